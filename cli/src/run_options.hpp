// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/cache_manager/namespace_quota.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/model/arena_layout.hpp"
#include "kvferry/ipc/model/geometry.hpp"
#include "options.hpp"

#include <CLI/CLI.hpp>

#include <cstdint>
#include <string>
#include <vector>

/// Options of the commands that start a whole instance themselves.
namespace kvferry::cli {

/// What the ranks of a run have for devices.
struct DeviceChoice {
  ipc::DeviceKind kind = ipc::DeviceKind::kHost;
  std::vector<int> cuda_ordinals;  ///< Ranks go round these; host devices have none.

  /// Ranks that share a GPU, at most.
  [[nodiscard]] std::uint64_t ranks_on_each(std::uint32_t ranks) const;
};
/// "auto", "host", "cuda", "cuda:0,2".
[[nodiscard]] ipc::Result<DeviceChoice> choose_devices(const std::string& text);
/// "cuda:0,cuda:1", each once, or "host".
[[nodiscard]] std::string describe_devices(const std::vector<ipc::DeviceSpec>& devices);
/// The GPU of each rank; none for host devices, which are made for an arena: host_devices().
[[nodiscard]] std::vector<ipc::DeviceSpec> cuda_devices(const DeviceChoice& choice,
                                                        std::uint32_t ranks);
/// A simulated device for each rank; prefix: what their names begin with.
[[nodiscard]] ipc::Result<std::vector<ipc::DeviceSpec>> host_devices(
    const std::string& prefix, const ipc::Geometry& geometry, const ipc::ArenaOptions& arena);

/// "--device".
CLI::Option* add_device_choice(CLI::App& app, std::string& target);
/// "--ranks".
CLI::Option* add_ranks(CLI::App& app, std::uint32_t& target);
/// "--geometry": empty means find the one that suits the device, see default_geometry().
CLI::Option* add_geometry(CLI::App& app, std::string& target);
[[nodiscard]] std::string default_geometry(ipc::DeviceKind device);
/// "--eviction-policy".
CLI::Option* add_eviction_policy(CLI::App& app, std::string& target);
/// "--namespace-quota": each text is one quota.
CLI::Option* add_namespace_quotas(CLI::App& app, std::vector<std::string>& texts);
/// Of those texts. kInvalidArgument, which names the option.
[[nodiscard]] ipc::Result<cache_manager::NamespaceQuotas> parse_namespace_quotas(
    const std::vector<std::string>& texts);
/// "--seed".
CLI::Option* add_seed(CLI::App& app, std::uint64_t& target, const std::string& help);
/// A file that is written at the end, and that can be: a slip is told before anything starts.
CLI::Option* add_output_file(CLI::App& app,
                             const std::string& name,
                             std::string& target,
                             const std::string& help);
/// A folder, made when it is missing.
CLI::Option* add_log_dir(CLI::App& app, const std::string& name, std::string& target);

}  // namespace kvferry::cli
