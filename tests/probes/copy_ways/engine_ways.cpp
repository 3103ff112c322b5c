// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "probes/copy_ways/engine_ways.hpp"

#include <span>
#include <utility>

namespace kvferry::probes {

std::vector<Piece> BlockWay::pieces(std::uint64_t call) const {
  std::vector<Piece> pieces;
  pieces.reserve(blocks_per_call() * kRegions);
  for (std::uint64_t i = 0; i < blocks_per_call(); ++i) {
    for (std::uint32_t region = 0; region < kRegions; ++region) {
      pieces.push_back(blocks_.chunk(block_of(call) + i, region));
    }
  }
  return pieces;
}

namespace {

class PlainCopy : public Way {
 public:
  PlainCopy(const BlockSequence& blocks, Direction direction, std::size_t size_bytes)
      : blocks_(blocks), direction_(direction), size_bytes_(size_bytes) {}

  void enqueue(std::uint64_t call, cudaStream_t stream) override {
    const CopyEnds ends = ends_of(piece(call), direction_);
    KVFERRY_PROBE_CUDA(
        cudaMemcpyAsync(ends.to, ends.from, size_bytes_, blocks_.copy_kind(direction_), stream));
  }
  std::vector<Piece> pieces(std::uint64_t call) const override { return {piece(call)}; }
  std::size_t call_bytes() const override { return size_bytes_; }

 private:
  Piece piece(std::uint64_t call) const {
    const auto place = [this, call](std::span<std::byte> memory) {
      return memory.data() + call % (memory.size() / size_bytes_) * size_bytes_;
    };
    return {place(blocks_.arena()), place(blocks_.far()), size_bytes_};
  }

  const BlockSequence& blocks_;
  Direction direction_;
  std::size_t size_bytes_;
};

class Rows : public BlockWay {
 public:
  Rows(const BlockSequence& blocks,
       Direction direction,
       std::uint32_t rows,
       std::uint64_t first_block)
      : BlockWay(blocks, direction, kEngineCallBytes, first_block), rows_(rows) {}

  void enqueue(std::uint64_t call, cudaStream_t stream) override {
    const std::size_t chunk_bytes = blocks().chunk_bytes();
    const bool to_host = direction() == Direction::kToHost;
    const std::size_t from_pitch = to_host ? blocks().pitch_bytes() : chunk_bytes;
    const std::size_t to_pitch = to_host ? chunk_bytes : blocks().pitch_bytes();
    for (std::uint64_t i = 0; i < blocks_per_call(); ++i) {
      for (std::uint32_t region = 0; region < kRegions; region += rows_) {
        const CopyEnds ends = ends_of(blocks().chunk(block_of(call) + i, region), direction());
        KVFERRY_PROBE_CUDA(cudaMemcpy2DAsync(ends.to, to_pitch, ends.from, from_pitch, chunk_bytes,
                                             rows_, blocks().copy_kind(direction()), stream));
      }
    }
  }

 private:
  std::uint32_t rows_;
};

class Batch : public BlockWay {
 public:
  Batch(const BlockSequence& blocks, Direction direction, unsigned flags, std::uint64_t first_block)
      : BlockWay(blocks, direction, kEngineCallBytes, first_block) {
    attributes_.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes_.flags = flags;
  }

  void enqueue(std::uint64_t call, cudaStream_t stream) override {
    targets_.clear();
    sources_.clear();
    for (std::uint64_t i = 0; i < blocks_per_call(); ++i) {
      for (std::uint32_t region = 0; region < kRegions; ++region) {
        const CopyEnds ends = ends_of(blocks().chunk(block_of(call) + i, region), direction());
        targets_.push_back(ends.to);
        sources_.push_back(ends.from);
      }
    }
    sizes_.assign(targets_.size(), blocks().chunk_bytes());
    std::size_t first_with_attributes = 0;
#if CUDART_VERSION >= 13000
    KVFERRY_PROBE_CUDA(cudaMemcpyBatchAsync(targets_.data(), sources_.data(), sizes_.data(),
                                            sizes_.size(), &attributes_, &first_with_attributes, 1,
                                            stream));
#else
    std::size_t failed = 0;
    KVFERRY_PROBE_CUDA(cudaMemcpyBatchAsync(targets_.data(), const_cast<void**>(sources_.data()),
                                            sizes_.data(), sizes_.size(), &attributes_,
                                            &first_with_attributes, 1, &failed, stream));
#endif
  }

 private:
  cudaMemcpyAttributes attributes_{};
  std::vector<void*> targets_;
  std::vector<const void*> sources_;
  std::vector<std::size_t> sizes_;
};

class Batch3d : public BlockWay {
 public:
  Batch3d(const BlockSequence& blocks, Direction direction)
      : BlockWay(blocks, direction, kEngineCallBytes, 0) {}

  void enqueue(std::uint64_t call, cudaStream_t stream) override {
    ops_.clear();
    for (std::uint64_t i = 0; i < blocks_per_call(); ++i) {
      const Piece first = blocks().chunk(block_of(call) + i, 0);
      const cudaMemcpy3DOperand arena = operand(first.arena, blocks().pitch_bytes());
      const cudaMemcpy3DOperand far = operand(first.far, blocks().chunk_bytes());
      cudaMemcpy3DBatchOp op{};
      op.src = direction() == Direction::kToHost ? arena : far;
      op.dst = direction() == Direction::kToHost ? far : arena;
      op.extent = make_cudaExtent(blocks().chunk_bytes(), kRegions, 1);
      op.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
      ops_.push_back(op);
    }
#if CUDART_VERSION >= 13000
    KVFERRY_PROBE_CUDA(cudaMemcpy3DBatchAsync(ops_.size(), ops_.data(), 0, stream));
#else
    std::size_t failed = 0;
    KVFERRY_PROBE_CUDA(cudaMemcpy3DBatchAsync(ops_.size(), ops_.data(), &failed, 0, stream));
#endif
  }

 private:
  static cudaMemcpy3DOperand operand(std::byte* start, std::size_t pitch_bytes) {
    cudaMemcpy3DOperand operand{};
    operand.type = cudaMemcpyOperandTypePointer;
    operand.op.ptr.ptr = start;
    operand.op.ptr.rowLength = pitch_bytes;
    operand.op.ptr.layerHeight = kRegions;
    return operand;
  }

  std::vector<cudaMemcpy3DBatchOp> ops_;
};

class SingleChunks : public BlockWay {
 public:
  SingleChunks(const BlockSequence& blocks, Direction direction)
      : BlockWay(blocks, direction, kEngineCallBytes, 0) {}

  void enqueue(std::uint64_t call, cudaStream_t stream) override {
    for (std::uint64_t i = 0; i < blocks_per_call(); ++i) {
      for (std::uint32_t region = 0; region < kRegions; ++region) {
        const CopyEnds ends = ends_of(blocks().chunk(block_of(call) + i, region), direction());
        KVFERRY_PROBE_CUDA(cudaMemcpyAsync(ends.to, ends.from, blocks().chunk_bytes(),
                                           blocks().copy_kind(direction()), stream));
      }
    }
  }
};

/// As many graphs as calls are under way, since one that runs cannot be launched beside itself.
/// They copy the same blocks each time: what new addresses would cost comes on top.
class GraphOfCopies : public BlockWay {
 public:
  GraphOfCopies(const BlockSequence& blocks, Direction direction, std::uint32_t branches)
      : BlockWay(blocks, direction, kEngineCallBytes, 0) {
    for (std::uint64_t call = 0; call < kCallsAhead; ++call) {
      graphs_.push_back(record(pieces(call), branches));
    }
  }

  void enqueue(std::uint64_t call, cudaStream_t stream) override {
    KVFERRY_PROBE_CUDA(cudaGraphLaunch(graphs_[call % kCallsAhead].get(), stream));
  }

 protected:
  std::uint64_t block_of(std::uint64_t call) const override {
    return BlockWay::block_of(call % kCallsAhead);
  }

 private:
  GraphExec record(const std::vector<Piece>& pieces, std::uint32_t branches) const {
    cudaGraph_t created = nullptr;
    KVFERRY_PROBE_CUDA(cudaGraphCreate(&created, 0));
    const Graph graph(created);
    std::vector<cudaGraphNode_t> last(branches, nullptr);
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      const CopyEnds ends = ends_of(pieces[i], direction());
      cudaGraphNode_t& before = last[i * branches / pieces.size()];
      cudaGraphNode_t node = nullptr;
      KVFERRY_PROBE_CUDA(cudaGraphAddMemcpyNode1D(
          &node, graph.get(), before == nullptr ? nullptr : &before, before == nullptr ? 0 : 1,
          ends.to, ends.from, pieces[i].size_bytes, blocks().copy_kind(direction())));
      before = node;
    }
    return instantiate(graph);
  }

  std::vector<GraphExec> graphs_;
};

class Staged : public Way {
 public:
  Staged(std::unique_ptr<Way> ring_way, const BlockSequence& host_blocks, Direction direction)
      : ring_way_(std::move(ring_way)), host_(host_blocks.far()), direction_(direction) {}

  void enqueue(std::uint64_t call, cudaStream_t stream) override {
    // The slot is free: call - kCallsAhead is over, and the ring has a slot for each call ahead.
    const bool to_host = direction_ == Direction::kToHost;
    std::byte* slot = ring_way_->pieces(call).front().far;
    if (to_host) {
      ring_way_->enqueue(call, stream_of_first_stage_.get());
      KVFERRY_PROBE_CUDA(cudaEventRecord(handed_over_.get(), stream_of_first_stage_.get()));
      KVFERRY_PROBE_CUDA(cudaStreamWaitEvent(stream, handed_over_.get(), 0));
      KVFERRY_PROBE_CUDA(
          cudaMemcpyAsync(host_slot(call), slot, call_bytes(), cudaMemcpyDeviceToHost, stream));
      return;
    }
    KVFERRY_PROBE_CUDA(cudaMemcpyAsync(slot, host_slot(call), call_bytes(), cudaMemcpyHostToDevice,
                                       stream_of_first_stage_.get()));
    KVFERRY_PROBE_CUDA(cudaEventRecord(handed_over_.get(), stream_of_first_stage_.get()));
    KVFERRY_PROBE_CUDA(cudaStreamWaitEvent(stream, handed_over_.get(), 0));
    ring_way_->enqueue(call, stream);
  }

  std::vector<Piece> pieces(std::uint64_t call) const override {
    std::vector<Piece> pieces = ring_way_->pieces(call);
    const std::byte* slot = pieces.front().far;
    for (Piece& piece : pieces) {
      piece.far = host_slot(call) + (piece.far - slot);
    }
    return pieces;
  }

  std::size_t call_bytes() const override { return ring_way_->call_bytes(); }

 private:
  std::byte* host_slot(std::uint64_t call) const {
    return host_.data() + call % (host_.size() / call_bytes()) * call_bytes();
  }

  std::unique_ptr<Way> ring_way_;
  std::span<std::byte> host_;
  Direction direction_;
  Event handed_over_ = make_event();
  // Declared last: what is enqueued on it uses the above.
  Stream stream_of_first_stage_ = make_stream(Priority::kHighest);
};

}  // namespace

std::unique_ptr<Way> plain_copy(const BlockSequence& blocks,
                                Direction direction,
                                std::size_t size_bytes) {
  return std::make_unique<PlainCopy>(blocks, direction, size_bytes);
}

std::unique_ptr<Way> rows(const BlockSequence& blocks,
                          Direction direction,
                          std::uint32_t rows,
                          std::uint64_t first_block) {
  return std::make_unique<Rows>(blocks, direction, rows, first_block);
}

std::unique_ptr<Way> batch(const BlockSequence& blocks,
                           Direction direction,
                           unsigned flags,
                           std::uint64_t first_block) {
  return std::make_unique<Batch>(blocks, direction, flags, first_block);
}

std::unique_ptr<Way> batch_3d(const BlockSequence& blocks, Direction direction) {
  return std::make_unique<Batch3d>(blocks, direction);
}

std::unique_ptr<Way> single_chunks(const BlockSequence& blocks, Direction direction) {
  return std::make_unique<SingleChunks>(blocks, direction);
}

std::unique_ptr<Way> graph(const BlockSequence& blocks,
                           Direction direction,
                           std::uint32_t branches) {
  return std::make_unique<GraphOfCopies>(blocks, direction, branches);
}

std::unique_ptr<Way> staged(std::unique_ptr<Way> ring_way,
                            const BlockSequence& host_blocks,
                            Direction direction) {
  return std::make_unique<Staged>(std::move(ring_way), host_blocks, direction);
}

}  // namespace kvferry::probes
