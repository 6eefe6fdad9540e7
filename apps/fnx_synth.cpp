// fnx-synth: writes a made-up checkpoint of a published or small geometry to a folder.
#include <fmt/format.h>

#include "kernels/error.h"
#include "libcore/cli/tool.h"
#include "libcore/format/pack_writer.h"

namespace {

struct Options {
  std::string model, out;
  bool sparse = false, dry_run = false;
};

void run(const Options& options, fnx::ToolRun& tool) {
  if (!fnx::is_synthetic(options.model))
    throw fnx::Error(
        fnx::ErrorKind::Usage,
        fmt::format("--model {}: give synth:NAME[,seed=..,bits=..,layers=..,experts=..,skew=..]", options.model));
  if (options.out.empty() && !options.dry_run)
    throw fnx::Error(fnx::ErrorKind::Usage, "give --out DIR, or --dry-run to see what would be written");
  const fnx::SyntheticSource source(fnx::SyntheticSpec::parse(options.model));
  fnx::Receipt& receipt = tool.receipt();
  receipt.add_subject("checkpoint", source.spec().text(), source.bytes(), source.fingerprint());
  receipt.result = {{"model", source.spec().text()},
                    {"digest", source.digest()},
                    {"tensors", source.tensors().size()},
                    {"bytes", source.bytes()},
                    {"sparse", options.sparse}};
  receipt.result["files"] = fnx::Json::array();
  for (const fnx::SourceFile& file : source.files())
    receipt.result["files"].push_back(fnx::Json{{"name", file.name}, {"data_bytes", file.bytes}});
  if (options.dry_run) {
    receipt.add_not_run("the files", "--dry-run");
  } else {
    fnx::PackWriteOptions how;
    how.sparse = options.sparse;
    how.progress = [&](uint64_t done, uint64_t total) { tool.progress("writing", done, total); };
    how.stopping = [&] { return tool.stopping(); };
    receipt.evidence["data_bytes_written"] = fnx::write_pack(source, options.out, how);
  }
  tool.print(fmt::format("{}: {} tensors, {} bytes in {} files, digest {}\n", source.spec().text(),
                         source.tensors().size(), source.bytes(), source.files().size(), source.digest()));
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  const fnx::ToolInfo info{
      "fnx-synth",
      "Writes a made-up checkpoint: right names, shapes and widths, numbers that mean nothing.",
      {"fnx-synth --model synth:tiny,layers=4,experts=8 --out small",
       "fnx-synth --model synth:flash-next-4.05bpw --sparse --out pack && fnx-inspect --model pack"}};
  return fnx::run_tool(
      argc, argv, info,
      [&](CLI::App& app) {
        app.add_option("--model", options.model,
                       "synth:NAME[,seed=..,bits=..,layers=..,experts=..,skew=..]; NAME is flash-next-3.05bpw, "
                       "flash-next-4.05bpw or tiny")
            ->required()
            ->type_name("SPEC");
        app.add_option("--out", options.out, "Folder to make; it appears when it is whole")->type_name("DIR");
        app.add_flag("--sparse", options.sparse, "Holes in place of data: for inspection, whatever the size");
        app.add_flag("--dry-run", options.dry_run, "Say what would be written");
      },
      [&](fnx::ToolRun& tool) { run(options, tool); });
}
