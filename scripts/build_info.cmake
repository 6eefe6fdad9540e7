# Writes OUT with the source's commit and whether the tree differs from it, and touches OUT only when that changed.
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
set(text "#pragma once\n#define FNX_COMMIT \"${commit}\"\n#define FNX_DIRTY \"${dirty}\"\n")
set(old "")
if(EXISTS ${OUT})
  file(READ ${OUT} old)
endif()
if(NOT old STREQUAL text)
  file(WRITE ${OUT} "${text}")
endif()
