// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "device/cuda_identity.hpp"

#include "device/cuda_context.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <string>

namespace kvferry::ipc {
namespace {

/// The first line of a file of /sys; empty when there is none, as in some containers.
std::string first_line(const std::filesystem::path& file) {
  std::ifstream in(file);
  std::string line;
  std::getline(in, line);
  return line;
}

/// 13010 -> "13.1".
std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

/// As nvidia-smi writes it.
std::string uuid_text(const cudaUUID_t& uuid) {
  std::string text = "GPU-";
  for (std::size_t i = 0; i < sizeof(uuid.bytes); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += fmt::format("{:02x}", static_cast<unsigned char>(uuid.bytes[i]));
  }
  return text;
}

// The speed that the slot can do, not what it does now: an idle GPU's link is slow.
std::string link_text(const std::string& bus_id) {
  const std::filesystem::path device = std::filesystem::path("/sys/bus/pci/devices") / bus_id;
  return fmt::format("{}, {} x{}", bus_id, first_line(device / "max_link_speed"),
                     first_line(device / "current_link_width"));
}

}  // namespace

Result<std::string> cuda_bus_id(int ordinal) {
  std::array<char, 32> text{};
  KVFERRY_CUDA_TRY(cudaDeviceGetPCIBusId(text.data(), static_cast<int>(text.size()), ordinal));
  std::string bus_id = text.data();
  std::transform(bus_id.begin(), bus_id.end(), bus_id.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return bus_id;
}

Result<DeviceIdentity> cuda_identity(int ordinal) {
  cudaDeviceProp properties{};
  KVFERRY_CUDA_TRY(cudaGetDeviceProperties(&properties, ordinal));
  KVFERRY_ASSIGN(const std::string bus_id, cuda_bus_id(ordinal));
  int driver = 0;
  int runtime = 0;
  KVFERRY_CUDA_TRY(cudaDriverGetVersion(&driver));
  KVFERRY_CUDA_TRY(cudaRuntimeGetVersion(&runtime));
  DeviceIdentity identity;
  identity.name = properties.name;
  identity.uuid = uuid_text(properties.uuid);
  identity.link = link_text(bus_id);
  identity.driver =
      fmt::format("{}, CUDA {}", first_line("/sys/module/nvidia/version"), version_text(driver));
  identity.runtime = version_text(runtime);
  return identity;
}

}  // namespace kvferry::ipc
