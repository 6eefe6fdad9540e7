# Writes OUT with the source's commit, whether the tree differs from it and the kernels' digest; touches OUT only when
# one of them changed.
# Usage: cmake -DSOURCE=DIR -DOUT=FILE -P build_info.cmake
set(commit "unknown")
set(dirty "unknown")
find_program(GIT git)
if(GIT)
  execute_process(COMMAND ${GIT} rev-parse --show-toplevel WORKING_DIRECTORY ${SOURCE} OUTPUT_VARIABLE top
                  RESULT_VARIABLE failed OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  get_filename_component(here "${SOURCE}" REALPATH)
  # An unpacked archive inside another repository has no commit of its own.
  if(NOT failed AND top STREQUAL here)
    execute_process(COMMAND ${GIT} rev-parse HEAD WORKING_DIRECTORY ${SOURCE} OUTPUT_VARIABLE head
                    RESULT_VARIABLE failed OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    execute_process(COMMAND ${GIT} --no-optional-locks status --porcelain WORKING_DIRECTORY ${SOURCE}
                    OUTPUT_VARIABLE changes ERROR_QUIET)
    if(NOT failed)
      set(commit "${head}")
      set(dirty "no")
      if(NOT changes STREQUAL "")
        set(dirty "yes")
      endif()
    endif()
  endif()
endif()
# Identifies the kernels: a qualification holds for these sources alone.
file(GLOB kernel_sources RELATIVE ${SOURCE} ${SOURCE}/kernels/*.h ${SOURCE}/kernels/cuda/*)
list(SORT kernel_sources)
set(kernel_hashes "")
foreach(source ${kernel_sources})
  file(SHA256 ${SOURCE}/${source} hash)
  string(APPEND kernel_hashes "${source} ${hash}\n")
endforeach()
string(SHA256 kernel_digest "${kernel_hashes}")
set(text "#pragma once\n#define FNX_COMMIT \"${commit}\"\n#define FNX_DIRTY \"${dirty}\"\n\
#define FNX_KERNEL_DIGEST \"${kernel_digest}\"\n")
set(old "")
if(EXISTS ${OUT})
  file(READ ${OUT} old)
endif()
if(NOT old STREQUAL text)
  file(WRITE ${OUT} "${text}")
endif()
