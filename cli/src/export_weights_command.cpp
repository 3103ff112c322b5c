// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/worker/weights_export_file.hpp"
#include "options.hpp"
#include "parent_watch.hpp"
#include "print.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <string>

namespace kvferry::cli {
namespace {

ipc::Result<ipc::DeviceSpec> choose_device(const std::string& text) {
  if (text != "auto") return ipc::DeviceSpec::parse(text);
  if (ipc::cuda_device_count() == 0) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "no GPU is there: name the workers' device with --device host:NAME:SIZE");
  }
  ipc::DeviceSpec first;
  first.kind = ipc::DeviceKind::kCuda;
  return first;
}

}  // namespace

int export_weights_command(const Arguments& arguments) {
  CommonOptions common;
  common.log_level = ipc::LogLevel::kWarn;
  worker::WeightsExportConfig config;
  config.lend.name = fmt::format("export-{}", ::getpid());
  std::string device = "auto";
  int parent_fd = -1;
  auto app = make_app(
      "export-weights",
      "Loads weights into device memory and lends them to the workers of an instance until it is "
      "told to end (SIGTERM, Ctrl-C): 'kvferry update-weights --from ipc' copies them from device "
      "to device. Trainers lend their own tensors with the class WeightsExporter instead.",
      "example: weights on the first GPU\n"
      "  kvferry export-weights --instance chat --file new.safetensors --name trainer &\n"
      "  kvferry update-weights --instance chat --from ipc --source trainer",
      common);
  app->add_option("--file", config.file, "A safetensors file")->type_name("FILE")->required();
  app->add_option("--name", config.lend.name, "What --source calls it [export-PID]")
      ->type_name("NAME");
  app->add_option("--device", device,
                  "cuda:N, or host:NAME:SIZE for the simulated device of the workers; auto: the "
                  "first GPU")
      ->type_name("DEVICE")
      ->default_str("auto");
  add_choice<ipc::HandleKind>(
      *app, "--handles", config.handles,
      {{"vmm", ipc::HandleKind::kVmm}, {"legacy", ipc::HandleKind::kLegacy}},
      "How the memory is shared");
  add_milliseconds(*app, "--deadline", config.return_deadline,
                   "How long workers may take to let go at the end");
  app->add_option("--parent-fd", parent_fd)->group("");
  if (const auto code = parse_arguments(*app, arguments)) return *code;
  auto chosen = choose_device(device);
  if (!chosen) return usage_error(*app, chosen.error());
  config.device = std::move(chosen).value();
  config.lend.runtime_dir = common.runtime_dir;
  config.lend.instance = common.instance;
  ipc::init_logging("export-weights", common.log_level);
  if (parent_fd >= 0) end_with_parent(parent_fd);
  try {
    worker::run_weights_export(
        config, [&config] { print_out("lends {} as {}\n", config.file, config.lend.name); });
    return kExitDone;
  } catch (const ipc::Exception& error) {
    return failure("export-weights", error.error());
  }
}

}  // namespace kvferry::cli
