// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "run/leak_check.hpp"

#include "kvferry/ipc/base/log.hpp"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <map>
#include <string_view>
#include <system_error>

namespace kvferry::cli {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kMemfdName = "/memfd:kvferry";

/// inode -> bytes of the named shared memory that a process holds open or has mapped.
void collect_memfds(const fs::path& process, std::map<std::uint64_t, std::uint64_t>& found) {
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(process / "fd", error)) {
    const std::string target = fs::read_symlink(entry.path(), error);
    if (error || !target.starts_with(kMemfdName)) continue;
    struct stat info {};
    if (stat(entry.path().c_str(), &info) != 0) continue;
    auto& bytes = found[info.st_ino];
    bytes = std::max(bytes, static_cast<std::uint64_t>(info.st_size));
  }
  std::ifstream maps(process / "maps");
  for (std::string line; std::getline(maps, line);) {
    // start-end perms offset dev inode path
    const std::size_t path = line.find(kMemfdName);
    if (path == std::string::npos) continue;
    std::uint64_t start = 0;
    std::uint64_t end = 0;
    std::uint64_t inode = 0;
    const char* const text_end = line.data() + line.size();
    const auto first = std::from_chars(line.data(), text_end, start, 16);
    if (first.ec != std::errc{} || first.ptr == text_end) continue;
    std::from_chars(first.ptr + 1, text_end, end, 16);
    std::size_t at = path;
    while (at > 0 && line[at - 1] == ' ') --at;
    while (at > 0 && std::isdigit(static_cast<unsigned char>(line[at - 1])) != 0) --at;
    std::from_chars(line.data() + at, text_end, inode);
    auto& bytes = found[inode];
    bytes = std::max(bytes, end - start);
  }
}

}  // namespace

DeviceProbe::DeviceProbe(const std::vector<ipc::DeviceSpec>& devices) {
  std::set<int> seen;
  for (const ipc::DeviceSpec& spec : devices) {
    if (spec.kind == ipc::DeviceKind::kHost) {
      host_.push_back({spec.to_string(), spec.host_name, spec.host_capacity_bytes});
      continue;
    }
    if (!seen.insert(spec.ordinal).second) continue;
    CudaDevice opened;
    opened.spec = spec.to_string();
    opened.device = ipc::open_device(spec);
    const auto memory = opened.device->memory_info();
    if (!memory) throw ipc::Exception(memory.error());
    opened.free_before = memory->free_bytes;
    smallest_free_ =
        smallest_free_ == 0 ? memory->free_bytes : std::min(smallest_free_, memory->free_bytes);
    cuda_.push_back(std::move(opened));
  }
}

ipc::Result<std::vector<DeviceFree>> DeviceProbe::free_now() const {
  std::vector<DeviceFree> found;
  for (const HostDevice& host : host_) {
    KVFERRY_ASSIGN(const std::uint64_t used, ipc::host_device_used_bytes(host.name));
    found.push_back({host.spec, host.capacity - std::min(used, host.capacity)});
  }
  for (const CudaDevice& cuda : cuda_) {
    KVFERRY_ASSIGN(const ipc::MemoryInfo memory, cuda.device->memory_info());
    found.push_back({cuda.spec, memory.free_bytes});
  }
  return found;
}

ipc::Result<std::uint64_t> DeviceProbe::taken_bytes() const {
  std::uint64_t taken = 0;
  for (const HostDevice& host : host_) {
    KVFERRY_ASSIGN(const std::uint64_t used, ipc::host_device_used_bytes(host.name));
    taken += used;
  }
  for (const CudaDevice& cuda : cuda_) {
    KVFERRY_ASSIGN(const ipc::MemoryInfo now, cuda.device->memory_info());
    if (now.free_bytes + kDriverNoiseBytes < cuda.free_before) {
      taken += cuda.free_before - now.free_bytes;
    }
  }
  return taken;
}

void HostMemoryProbe::observe(pid_t child) {
  std::map<std::uint64_t, std::uint64_t> found;
  collect_memfds(fmt::format("/proc/{}", child), found);
  for (const auto& [inode, bytes] : found) inodes_.insert(inode);
}

std::uint64_t HostMemoryProbe::leaked_bytes() const {
  std::map<std::uint64_t, std::uint64_t> held;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator("/proc", error)) {
    const std::string name = entry.path().filename();
    const bool is_process =
        std::all_of(name.begin(), name.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
    if (is_process) collect_memfds(entry.path(), held);
  }
  std::uint64_t leaked = 0;
  for (const auto& [inode, bytes] : held) {
    if (inodes_.contains(inode)) leaked += bytes;
  }
  return leaked;
}

}  // namespace kvferry::cli
