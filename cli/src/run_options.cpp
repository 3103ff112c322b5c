// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "run_options.hpp"

#include "kvferry/cache_manager/eviction_policy.hpp"
#include "rank_options.hpp"
#include "run/report_file.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <string_view>
#include <system_error>

namespace kvferry::cli {
namespace {

using ipc::Result;

constexpr std::uint32_t kMostRanks = 64;

Result<std::uint64_t> parse_seed(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc{} && end == text.data() + text.size()) return value;
  return KVFERRY_ERROR(kInvalidArgument, "'{}' is no whole number from 0 to {}", text, UINT64_MAX);
}

Result<std::string> parse_output_file(std::string_view text) {
  KVFERRY_TRY(check_report_file(std::string(text)));
  return std::string(text);
}

Result<std::string> parse_log_dir(std::string_view text) {
  const std::filesystem::path dir(text);
  std::error_code error;
  std::filesystem::create_directories(dir, error);
  if (!std::filesystem::is_directory(dir) || ::access(dir.c_str(), W_OK | X_OK) != 0) {
    return KVFERRY_ERROR(kInvalidArgument, "'{}' is no directory that can be written to", text);
  }
  return std::filesystem::absolute(dir).string();
}

/// "0,2": the GPUs by number, each of which is one of `count`.
Result<std::vector<int>> parse_ordinals(const std::string& text, std::string_view rest, int count) {
  std::vector<int> ordinals;
  while (true) {
    int ordinal = -1;
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), ordinal);
    const bool ends = end == rest.data() + rest.size();
    if (error != std::errc{} || ordinal < 0 || (!ends && *end != ',')) break;
    if (ordinal >= count) {
      return KVFERRY_ERROR(kInvalidArgument, "--device {}: there is no cuda:{}; usable here: {}",
                           text, ordinal, count);
    }
    ordinals.push_back(ordinal);
    if (ends) return ordinals;
    rest.remove_prefix(static_cast<std::size_t>(end - rest.data()) + 1);
  }
  return KVFERRY_ERROR(kInvalidArgument, "--device '{}': write e.g. cuda:0 or cuda:0,1", text);
}

}  // namespace

std::uint64_t DeviceChoice::ranks_on_each(std::uint32_t ranks) const {
  const std::uint64_t gpus = std::max<std::size_t>(1, cuda_ordinals.size());
  return (ranks + gpus - 1) / gpus;
}

Result<DeviceChoice> choose_devices(const std::string& text) {
  constexpr std::string_view kPrefix = "cuda:";
  const int count = ipc::cuda_device_count();
  DeviceChoice choice;
  if (text == "host" || (text == "auto" && count == 0)) return choice;
  choice.kind = ipc::DeviceKind::kCuda;
  if (text == "auto" || text == "cuda") {
    for (int i = 0; i < count; ++i) choice.cuda_ordinals.push_back(i);
  } else if (text.starts_with(kPrefix)) {
    KVFERRY_ASSIGN(choice.cuda_ordinals,
                   parse_ordinals(text, std::string_view(text).substr(kPrefix.size()), count));
  } else {
    return KVFERRY_ERROR(kInvalidArgument, "--device '{}' is none of auto, host, cuda, cuda:N,...",
                         text);
  }
  if (count == 0) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "--device {}: no usable CUDA device here; try --device host", text);
  }
  return choice;
}

std::string describe_devices(const std::vector<ipc::DeviceSpec>& devices) {
  std::vector<std::string> names;
  for (const ipc::DeviceSpec& device : devices) {
    if (device.kind == ipc::DeviceKind::kHost) return "host";
    names.push_back(device.to_string());
  }
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return fmt::format("{}", fmt::join(names, ","));
}

std::vector<ipc::DeviceSpec> cuda_devices(const DeviceChoice& choice, std::uint32_t ranks) {
  std::vector<ipc::DeviceSpec> devices;
  if (choice.kind != ipc::DeviceKind::kCuda) return devices;
  for (std::uint32_t r = 0; r < ranks; ++r) {
    ipc::DeviceSpec spec;
    spec.kind = ipc::DeviceKind::kCuda;
    spec.ordinal = choice.cuda_ordinals[r % choice.cuda_ordinals.size()];
    devices.push_back(spec);
  }
  return devices;
}

Result<std::vector<ipc::DeviceSpec>> host_devices(const std::string& prefix,
                                                  const ipc::Geometry& geometry,
                                                  const ipc::ArenaOptions& arena) {
  std::vector<ipc::DeviceSpec> devices;
  for (std::uint32_t r = 0; r < geometry.ranks; ++r) {
    KVFERRY_ASSIGN(auto device, host_device_for(fmt::format("{}-{}", prefix, r), geometry, arena));
    devices.push_back(std::move(device));
  }
  return devices;
}

CLI::Option* add_device_choice(CLI::App& app, std::string& target) {
  return app
      .add_option(
          "--device", target,
          "host: simulated devices; cuda, cuda:N,...: GPUs, ranks go round them; auto: GPUs "
          "when there are any")
      ->type_name("auto|host|cuda[:N,...]")
      ->default_str("auto");
}

CLI::Option* add_ranks(CLI::App& app, std::uint32_t& target) {
  return app.add_option("--ranks", target, "Tensor-parallel ranks: a mover and a worker each")
      ->type_name("N")
      ->check(CLI::Range(1U, kMostRanks))
      ->default_str("1");
}

CLI::Option* add_geometry(CLI::App& app, std::string& target) {
  return app
      .add_option("--geometry", target,
                  "Shape of the KV cache: a preset or a .toml file [host: tiny, cuda: llama-3-8b]")
      ->type_name("NAME|FILE.toml");
}

std::string default_geometry(ipc::DeviceKind device) {
  return device == ipc::DeviceKind::kCuda ? "llama-3-8b" : "tiny";
}

CLI::Option* add_eviction_policy(CLI::App& app, std::string& target) {
  const auto known = cache_manager::eviction_policies();
  return add_parsed<std::string>(
             app, "--eviction-policy", target,
             [known](std::string_view text) -> Result<std::string> {
               if (std::find(known.begin(), known.end(), text) != known.end()) {
                 return std::string(text);
               }
               return KVFERRY_ERROR(kInvalidArgument, "'{}' is none of {}", text,
                                    fmt::join(known, "|"));
             },
             "Which blocks of host memory go for others")
      ->type_name(fmt::format("{}", fmt::join(known, "|")))
      ->default_str(target);
}

CLI::Option* add_namespace_quotas(CLI::App& app, std::vector<std::string>& texts) {
  return app
      .add_option(
          "--namespace-quota", texts,
          "What a namespace may have of that memory, in sizes or percent: one that has no more "
          "than SOFT keeps its blocks while others have more than theirs, and it never has "
          "more than HARD")
      ->type_name("NAME=SOFT:HARD,...")
      ->delimiter(',');
}

ipc::Result<cache_manager::NamespaceQuotas> parse_namespace_quotas(
    const std::vector<std::string>& texts) {
  cache_manager::NamespaceQuotas quotas;
  for (const std::string& text : texts) {
    auto parsed = cache_manager::parse_named_quota(text);
    if (!parsed) {
      return KVFERRY_ERROR(kInvalidArgument, "--namespace-quota: {}", parsed.error().message);
    }
    const auto [known, is_new] = quotas.named.insert(*parsed);
    if (!is_new) {
      return KVFERRY_ERROR(
          kInvalidArgument, "--namespace-quota {}: namespace {} has one of {}:{} already", text,
          known->first, known->second.soft.to_string(), known->second.hard.to_string());
    }
  }
  return quotas;
}

CLI::Option* add_seed(CLI::App& app, std::uint64_t& target, const std::string& help) {
  return add_parsed<std::uint64_t>(app, "--seed", target, parse_seed, help)
      ->type_name("N")
      ->default_str("0");
}

CLI::Option* add_output_file(CLI::App& app,
                             const std::string& name,
                             std::string& target,
                             const std::string& help) {
  return add_parsed<std::string>(app, name, target, parse_output_file, help);
}

CLI::Option* add_log_dir(CLI::App& app, const std::string& name, std::string& target) {
  return add_parsed<std::string>(
             app, name, target, parse_log_dir,
             "Write the processes' logs there, where they stay [removed at the end]")
      ->type_name("DIR");
}

}  // namespace kvferry::cli
