// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "weights_store.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "kvferry/ipc/device/await_stream.hpp"
#include "kvferry/kernels/host_twins.hpp"
#include "make_stream.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

namespace kvferry::worker {

using ipc::Deadline;
using ipc::Result;
using ipc::Status;

namespace {

constexpr std::uint64_t kTransientSizes = 8;

std::unique_ptr<ipc::PinnedBuffer> make_bounce(ipc::Device& device, std::uint64_t size_bytes) {
  auto buffer = device.make_pinned_buffer(size_bytes);
  if (!buffer) throw ipc::Exception(std::move(buffer).error());
  return std::move(buffer).value();
}

}  // namespace

WeightsStore::WeightsStore(ipc::Device& device,
                           CachingAllocator& allocator,
                           ModelTables& tables,
                           ipc::Rank rank,
                           std::uint32_t ranks,
                           bool replicated,
                           ipc::ComponentStrategy strategy,
                           bool broadcasts)
    : device_(device),
      allocator_(allocator),
      rank_(rank),
      ranks_(ranks),
      shares_table_(replicated && ranks > 1),
      strategy_(strategy),
      broadcasts_(broadcasts),
      tables_(tables),
      bounce_(make_bounce(device, kBounceBytes)),
      stream_(make_stream(device, ipc::StreamPriority::kNormal)) {}

Result<std::uint64_t> WeightsStore::prepare(const ipc::WeightsSource& source, Deadline deadline) {
  prepared_ = {};
  drop_group();  // Updates come in another way now.
  KVFERRY_TRY(let_go_of_last());
  KVFERRY_TRY(check_not_released());
  if (source.from == ipc::WeightsFrom::kIpc) return prepare_lent(source.location, deadline);
  KVFERRY_ASSIGN(const SafetensorsFile file, SafetensorsFile::open(source.location));
  if (file.tensors().empty()) {
    return KVFERRY_ERROR(kInvalidArgument, "weights file {} holds no tensor", source.location);
  }
  KVFERRY_TRY(check_same(file.tensors(), fmt::format("weights file {}", source.location)));
  ++loads_;
  Load load;
  std::uint64_t total = 0;
  for (const TensorInfo& tensor : file.tensors()) {
    KVFERRY_ASSIGN(Prepared part, read_part(file, tensor, deadline));
    total += part.bytes.size();
    if (lacks_memory() && !part.bytes.empty()) {
      KVFERRY_ASSIGN(part.memory, allocator_.allocate(part.bytes.size()));
    }
    if (!is_layerwise() && !part.bytes.empty()) {
      KVFERRY_ASSIGN(part.transient,
                     allocator_.allocate(transient_bytes(load.parts.size(), part.bytes.size())));
    }
    load.parts.push_back(std::move(part));
  }
  if (is_layerwise()) KVFERRY_TRY(make_layer(load, /*with_transient=*/true));
  KVFERRY_TRY(tables_.memory(deadline));  // A first commit, too, fails only with the device.
  if (shares_table_) KVFERRY_TRY(fold_whole(file, deadline, load.shared_table));
  prepared_ = std::move(load);
  ipc::log_info("weights: rank {} read {} of {} tensors from {}", rank_.value,
                ipc::format_size(total), prepared_.parts.size(), source.location);
  return total;
}

Status WeightsStore::check_not_released() const {
  if (!released_) return ipc::ok();
  return KVFERRY_ERROR(kNotReady, "the weights of rank {} are released: resume them first",
                       rank_.value);
}

Status WeightsStore::check_same(const std::vector<TensorInfo>& tensors,
                                const std::string& place) const {
  if (tensors_.empty()) return ipc::ok();
  for (std::size_t i = 0; i < std::max(tensors.size(), tensors_.size()); ++i) {
    const std::string have =
        i < tensors_.size() ? fmt::format("'{}' {}", tensors_[i].name, tensors_[i].shape) : "none";
    const std::string given =
        i < tensors.size() ? fmt::format("'{}' {}", tensors[i].name, describe(tensors[i])) : "none";
    if (have != given) {
      return KVFERRY_ERROR(kGeometryMismatch,
                           "{}: its tensor number {} is {}, the model in use has {}: "
                           "give weights of the same model",
                           place, i, given, have);
    }
  }
  return ipc::ok();
}

WeightsStore::Share WeightsStore::share_of(const TensorInfo& tensor) const {
  const bool dealt_out =
      ranks_ > 1 && !tensor.shape.empty() && tensor.shape[0] > 0 && tensor.shape[0] % ranks_ == 0;
  const std::uint64_t size = dealt_out ? tensor.size_bytes / ranks_ : tensor.size_bytes;
  return {size, dealt_out ? size * rank_.value : 0};
}

Result<WeightsStore::Prepared> WeightsStore::read_part(const SafetensorsFile& file,
                                                       const TensorInfo& tensor,
                                                       Deadline deadline) const {
  const Share share = share_of(tensor);
  const std::uint64_t size = share.size_bytes;
  const std::uint64_t start = tensor.offset + share.start;
  Prepared part{tensor.name, describe(tensor), {}, {}, {}, size};
  try {
    part.bytes.resize(size);
  } catch (const std::bad_alloc&) {
    return KVFERRY_ERROR(kNoHostMemory, "tensor '{}' of {} bytes does not fit this process",
                         tensor.name, size);
  }
  for (std::size_t done = 0; done < part.bytes.size(); done += kReadBytes) {
    KVFERRY_TRY(check_time(tensor, done, deadline));
    const std::size_t length = std::min<std::size_t>(kReadBytes, part.bytes.size() - done);
    KVFERRY_TRY(file.read(start + done, std::span(part.bytes).subspan(done, length)));
  }
  return part;
}

Status WeightsStore::commit(Deadline deadline) {
  if (prepared_.parts.empty()) {
    return KVFERRY_ERROR(kStaleEpoch, "no weights are prepared on rank {}: prepare them first",
                         rank_.value);
  }
  KVFERRY_TRY(let_go_of_last());
  committing_ = std::exchange(prepared_, {});
  Load& load = committing_;
  place_tensors(load);
  KVFERRY_ASSIGN(const ipc::DevicePtr tables, tables_.memory(deadline));
  KVFERRY_TRY(stream_->zero(tables, 2 * ModelTables::kTableBytes));
  for (std::size_t i = 0; i < load.parts.size(); ++i) {
    if (load.parts[i].size_bytes == 0) continue;
    KVFERRY_TRY(load_tensor(load, i, tables, deadline));
  }
  KVFERRY_TRY(finish_tables(load, tables, deadline));
  committing_ = {};
  tables_.set_holds_weights();
  return ipc::ok();
}

void WeightsStore::place_tensors(Load& load) {
  if (tensors_.empty()) {
    for (const Prepared& part : load.parts) {
      tensors_.push_back({part.name, part.shape, {}, part.size_bytes});
    }
    offloaded_ = true;  // That is, without memory.
  }
  if (!lacks_memory()) return;
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    tensors_[i].memory = std::move(load.parts[i].memory);
    tensors_[i].host = {};
  }
  offloaded_ = false;
  note_device_bytes();
}

// What follows on the stream may use the memory of a layer again: it is all in order.
Status WeightsStore::load_tensor(Load& load,
                                 std::size_t tensor,
                                 ipc::DevicePtr tables,
                                 Deadline deadline) {
  Prepared& part = load.parts[tensor];
  const std::uint64_t size = part.size_bytes;
  const ipc::DevicePtr memory =
      is_layerwise() ? load.layer.address() : tensors_[tensor].memory.address();
  if (part.bytes.empty()) {
    KVFERRY_TRY(stream_->copy_within(part.transient.address(), memory, size));
    if (is_layerwise()) {
      tensors_[tensor].host = std::move(part.host);
      KVFERRY_TRY(keep_on_host(tensor, memory, deadline));
    }
  } else {
    KVFERRY_TRY(copy(part.bytes, memory, deadline));
    if (is_layerwise()) tensors_[tensor].host = std::move(part.bytes);
  }
  const ScratchBuffer& transient = part.transient.valid() ? part.transient : load.layer_transient;
  KVFERRY_TRY(stream_->expand(memory, size, transient.address(),
                              std::min(transient.size_bytes(), transient_bytes(tensor, size))));
  // Its size is of no consequence for the model: only so much of it is read.
  KVFERRY_TRY(stream_->fold(transient.address(), size, tensor, tables + ModelTables::kTableBytes));
  return shares_table_ ? ipc::ok() : stream_->fold(transient.address(), size, tensor, tables);
}

// Of what failed, work may still run: what it writes is not anybody else's before it ends.
Status WeightsStore::let_go_of_last() {
  if (broadcast_) broadcast_->end();
  KVFERRY_ASSIGN(const bool ended, stream_->query());
  if (!ended) {
    return KVFERRY_ERROR(
        kBusy, "rank {}: work of an earlier update still runs on the device: retry", rank_.value);
  }
  loan_.reset();
  broadcast_.reset();
  committing_ = {};
  return ipc::ok();
}

// Like repacking for a kernel's layout: as large as the tensor, or up to as much again.
std::uint64_t WeightsStore::transient_bytes(std::size_t tensor, std::uint64_t size_bytes) const {
  return size_bytes + size_bytes * ((loads_ * 5 + tensor * 3) % kTransientSizes) / kTransientSizes;
}

Status WeightsStore::finish_tables(const Load& load, ipc::DevicePtr tables, Deadline deadline) {
  KVFERRY_TRY(stream_->notify(copied_.fd()));
  KVFERRY_TRY(await_stream(*stream_, copied_, deadline, "packing weights for the model"));
  if (!shares_table_) return ipc::ok();
  return copy(std::as_bytes(std::span(load.shared_table)), tables, deadline);
}

// A rank reads all of the file only for this.
Status WeightsStore::fold_whole(const SafetensorsFile& file,
                                Deadline deadline,
                                std::vector<std::uint64_t>& table) const {
  table.assign(kernels::kModelWords, 0);
  std::vector<std::byte> piece(kReadBytes);
  std::uint64_t seed = 0;
  for (const TensorInfo& tensor : file.tensors()) {
    for (std::uint64_t done = 0; done < tensor.size_bytes; done += kReadBytes) {
      KVFERRY_TRY(check_time(tensor, done, deadline));
      const auto length =
          static_cast<std::size_t>(std::min<std::uint64_t>(kReadBytes, tensor.size_bytes - done));
      KVFERRY_TRY(file.read(tensor.offset + done, std::span(piece).first(length)));
      kernels::host::fold(reinterpret_cast<const unsigned char*>(piece.data()), length, seed++,
                          table.data());
    }
  }
  return ipc::ok();
}

Status WeightsStore::check_time(const TensorInfo& tensor,
                                std::uint64_t done,
                                Deadline deadline) const {
  if (cancelled_.load()) {
    return KVFERRY_ERROR(kCancelled, "the update was given up at tensor '{}'", tensor.name);
  }
  if (deadline.expired()) {
    return KVFERRY_ERROR(kTimeout,
                         "tensor '{}': {} bytes of this rank's part were read by the deadline",
                         tensor.name, done);
  }
  return ipc::ok();
}

Status WeightsStore::copy(std::span<const std::byte> from, ipc::DevicePtr to, Deadline deadline) {
  for (std::size_t done = 0; done < from.size(); done += kBounceBytes) {
    const std::size_t length = std::min<std::size_t>(kBounceBytes, from.size() - done);
    std::memcpy(bounce_->data(), from.data() + done, length);
    const std::array ops{ipc::CopyOp{bounce_->data(), to + done, length}};
    KVFERRY_TRY(stream_->copy(ipc::CopyDirection::kHostToDevice, ops, ipc::CopyMode::kEach));
    KVFERRY_TRY(stream_->notify(copied_.fd()));
    KVFERRY_TRY(await_stream(*stream_, copied_, deadline, "copying weights to the device"));
  }
  return ipc::ok();
}

void WeightsStore::abandon() {
  prepared_ = {};
  opened_.reset();
  drop_group();            // It may have failed at another rank.
  (void)let_go_of_last();  // What still runs keeps it until the next look.
  cancelled_.store(false);
}

}  // namespace kvferry::worker
