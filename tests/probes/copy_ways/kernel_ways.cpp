// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "probes/copy_ways/kernel_ways.hpp"

#include "probes/copy_ways/kernels.hpp"

#include <vector>

namespace kvferry::probes {
namespace {

/// Calls whose blocks the device has a list of; later ones repeat them.
constexpr std::uint64_t kListedCalls = 256;

unsigned interval_of(const KernelShape& shape) {
  if (shape.pace_gbps <= 0) {
    return 0;
  }
  const unsigned issuers = shape.copy == KernelCopy::kBulk ? 1 : shape.warps;
  return static_cast<unsigned>(kPieceBytes * issuers / shape.pace_gbps);  // bytes / (GB/s) = ns
}

class KernelWay : public BlockWay {
 public:
  KernelWay(const BlockSequence& blocks,
            Direction direction,
            const KernelShape& shape,
            std::uint64_t first_block)
      : BlockWay(blocks, direction, kKernelCallBytes, first_block), shape_(shape) {
    std::vector<BlockPair> pairs;
    for (std::uint64_t call = 0; call < kListedCalls; ++call) {
      for (std::uint64_t i = 0; i < blocks_per_call(); ++i) {
        pairs.push_back(blocks.pair(block_of(call) + i));
      }
    }
    const std::size_t size_bytes = pairs.size() * sizeof(BlockPair);
    pairs_ = allocate_device(size_bytes);
    KVFERRY_PROBE_CUDA(cudaMemcpy(pairs_.data(), pairs.data(), size_bytes, cudaMemcpyHostToDevice));
  }

  void enqueue(std::uint64_t call, cudaStream_t stream) override {
    const auto* pairs = reinterpret_cast<const BlockPair*>(pairs_.data());
    const KernelBlocks what{
        .arena = blocks().arena().data(),
        .far = blocks().far().data(),
        .pairs = pairs + call % kListedCalls * blocks_per_call(),
        .count = static_cast<std::uint32_t>(blocks_per_call()),
        .regions = kRegions,
        .chunk_bytes = blocks().chunk_bytes(),
        .pitch_bytes = blocks().pitch_bytes(),
        .to_far = direction() == Direction::kToHost,
    };
    const unsigned interval_ns = interval_of(shape_);
    if (shape_.copy == KernelCopy::kBulk) {
      KVFERRY_PROBE_CUDA(launch_bulk_copy(what, shape_.thread_blocks, interval_ns, stream));
    } else {
      KVFERRY_PROBE_CUDA(
          launch_plain_copy(what, shape_.thread_blocks, shape_.warps, interval_ns, stream));
    }
  }

 protected:
  std::uint64_t block_of(std::uint64_t call) const override {
    return BlockWay::block_of(call % kListedCalls);
  }

 private:
  KernelShape shape_;
  DeviceMemory pairs_;
};

}  // namespace

std::unique_ptr<Way> kernel_copy(const BlockSequence& blocks,
                                 Direction direction,
                                 const KernelShape& shape,
                                 std::uint64_t first_block) {
  return std::make_unique<KernelWay>(blocks, direction, shape, first_block);
}

}  // namespace kvferry::probes
