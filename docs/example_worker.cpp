// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
//
// The GPU process of an engine that allocates its KV tensors by itself: one tensor per layer, K and
// V in it, from its own caching allocator. It registers them as regions and serves until stdin
// closes.
// Usage: example_worker DEVICE [ENGINE], beside a manager and a mover of the same geometry:
//   kvferry mover --geometry tiny --gpu-blocks 64 --handles legacy --device DEVICE
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/worker/caching_allocator.hpp"
#include "kvferry/worker/registration.hpp"

#include <iostream>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace {

using kvferry::ipc::ArenaRequest;
using kvferry::ipc::DeviceSpec;
using kvferry::ipc::Epoch;
using kvferry::ipc::RankConfig;
using kvferry::ipc::RegionMemory;
using kvferry::ipc::RegionRequest;
using kvferry::ipc::Result;
using kvferry::ipc::Status;
using kvferry::worker::CachingAllocator;
using kvferry::worker::ScratchBuffer;

/// The engine's KV cache. In a framework, a ScratchBuffer is a tensor.
class KvCache final : public kvferry::ipc::ArenaSource {
 public:
  explicit KvCache(CachingAllocator& allocator) : allocator_(allocator) {}

  Result<std::vector<RegionMemory>> allocate(const ArenaRequest& request) override {
    std::vector<ScratchBuffer> tensors;
    std::vector<RegionMemory> regions;
    const auto& wanted = request.regions;
    for (std::size_t i = 0; i + 1 < wanted.size(); i += 2) {  // K and V of one layer
      const std::uint64_t half = wanted[i].block_bytes * wanted[i].block_count;
      KVFERRY_ASSIGN(ScratchBuffer tensor, allocator_.allocate(2 * half));
      for (const std::uint64_t offset : {std::uint64_t{0}, half}) {
        const std::uint64_t block = wanted[i].block_bytes;
        regions.push_back({tensor.address() + offset, half, block, /*block_stride=*/block});
      }
      tensors.push_back(std::move(tensor));
    }
    epochs_[request.epoch.value] = std::move(tensors);
    return regions;
  }

  /// Every mover has let go: drop the tensors, and give the cached segments back to the driver.
  Status release(Epoch epoch) override {
    epochs_.erase(epoch.value);
    allocator_.empty_cache(kvferry::ipc::EmptyReason::kClear);
    return kvferry::ipc::ok();
  }

 private:
  CachingAllocator& allocator_;
  std::map<std::uint64_t, std::vector<ScratchBuffer>> epochs_;
};

Status serve(const std::string& device_text, const std::string& engine) {
  RankConfig identity;
  identity.engine = engine;
  KVFERRY_ASSIGN(identity.device, DeviceSpec::parse(device_text));
  KVFERRY_ASSIGN(identity.geometry, kvferry::ipc::load_geometry("tiny", 1));
  identity.handles = kvferry::ipc::HandleKind::kLegacy;  // what cudaMalloc memory has
  identity.arena.gpu_blocks = 64;
  identity.arena.staging_slot_bytes = 1 << 20;
  identity.arena.staging_slots = 4;

  const auto device = kvferry::ipc::open_device(identity.device);
  CachingAllocator allocator(*device);
  KvCache cache(allocator);
  KVFERRY_ASSIGN(const auto worker, kvferry::worker::register_worker(*device, identity, cache));
  const auto view = worker->view();
  std::cout << "registered: epoch " << view.epoch.value << ", " << view.group_blocks.at(0)
            << " device blocks" << std::endl;

  for (std::string line; std::getline(std::cin, line);) {
    // A step: while `use` lives, no clear takes the memory away.
    auto use = worker->enter();
    if (!use) {
      std::cout << "not now: " << use.error().message << std::endl;
      continue;
    }
    // Here the engine launches its kernels and waits until they are done.
    std::cout << "step ran on epoch " << use->arena().epoch.value << std::endl;
  }
  worker->close();
  // Memory that a stalled peer still maps was not released; it goes with this process.
  if (worker->view().quarantined_bytes > 0) std::quick_exit(1);
  return kvferry::ipc::ok();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::cerr << "usage: example_worker DEVICE [ENGINE]\n";
    return 2;
  }
  kvferry::ipc::init_logging("example", kvferry::ipc::LogLevel::kWarn);
  try {
    const Status served = serve(argv[1], argc > 2 ? argv[2] : "default");
    if (served) return 0;
    std::cerr << served.error().to_string() << '\n';
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
  }
  return 1;
}
