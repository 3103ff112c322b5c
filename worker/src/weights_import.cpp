// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/weights_import.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"
#include "kvferry/ipc/wire/loan_messages.hpp"
#include "safetensors.hpp"

#include <algorithm>
#include <optional>
#include <utility>

namespace kvferry::worker {

using ipc::Deadline;
using ipc::LoanPart;
using ipc::Result;
using ipc::Status;

namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

/// Between two looks at cancellation.
constexpr ipc::Duration kLoanLook = 100ms;
/// A lender that lives answers at once.
constexpr ipc::Duration kReturnAnswer = 2s;

/// What a lender may say of itself; what any other code means, such as "no manager", is not its to
/// say.
ipc::Error refusal_of(const ipc::Error& said) {
  if (said.code == ipc::ErrorCode::kNotReady || said.code == ipc::ErrorCode::kVersionMismatch) {
    return {said.code, std::string(shown(said.message))};
  }
  return KVFERRY_ERROR(kProtocol, "it refuses as {}: {}", ipc::to_string(said.code),
                       shown(said.message));
}

}  // namespace

class WeightsImport::Impl {
 public:
  Impl(std::string name, ipc::PacketSocket socket, ipc::ProcessRef lender)
      : name_(std::move(name)), socket_(std::move(socket)), process_(std::move(lender)) {}
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl() {
    if (!owes_) return;
    if (const Status back = give_back(Deadline::after(kReturnAnswer)); !back) {
      ipc::log_warn("weights: {}", back.error().to_string());
    }
  }

  Status take(Deadline deadline, const std::atomic<bool>& cancelled);
  Status map(ipc::Device& device);
  [[nodiscard]] ipc::DevicePtr address(std::size_t tensor) const;
  [[nodiscard]] Status check_lender() const;
  Status give_back(Deadline deadline);
  [[nodiscard]] const std::vector<LentTensorInfo>& tensors() const noexcept { return infos_; }
  [[nodiscard]] std::string lender() const {
    return fmt::format("exporter '{}' (pid {})", name_, process_.pid());
  }

 private:
  struct Place {
    std::uint32_t allocation = 0;
    std::uint64_t offset = 0;
  };

  Status ask(ipc::LoanStep step);
  Result<ipc::Packet> hear(Deadline deadline, const std::atomic<bool>* cancelled);
  Status take_part(ipc::Packet packet, bool first);
  Status take_handles(LoanPart& part, std::vector<ipc::UniqueFd> fds);
  Status take_tensor(ipc::LentTensor& tensor);
  [[nodiscard]] bool complete() const noexcept {
    return sizes_.size() == total_allocations_ && infos_.size() == total_tensors_;
  }
  [[nodiscard]] ipc::Error lost(const ipc::Error& why) const;
  [[nodiscard]] ipc::Error given_up() const {
    return KVFERRY_ERROR(kCancelled, "the update was given up while {} was asked", lender());
  }

  const std::string name_;
  ipc::PacketSocket socket_;
  ipc::ProcessRef process_;
  std::uint32_t total_allocations_ = 0;
  std::uint32_t total_tensors_ = 0;
  std::vector<ipc::ExportedHandle> handles_;  ///< Until map().
  std::vector<std::uint64_t> sizes_;          ///< Of all allocations.
  std::vector<LentTensorInfo> infos_;
  std::vector<Place> places_;
  std::vector<std::unique_ptr<ipc::DeviceMemory>> mapped_;
  bool owes_ = false;  ///< The lender waits to hear that what it gave is let go of.
};

ipc::Error WeightsImport::Impl::lost(const ipc::Error& why) const {
  if (why.code != ipc::ErrorCode::kPeerDied) {
    ipc::Error named = why;
    named.message = fmt::format("{}: {}", lender(), why.message);
    return named;
  }
  // Its socket closes before its end can be seen.
  // wait: the end of a lender whose socket is closed; kLoanLook; that end
  const bool died = process_.wait_death(Deadline::after(kLoanLook));
  return KVFERRY_ERROR(kPeerDied, "{} {}: nothing of its weights is used", lender(),
                       died ? "died" : "closed its connection");
}

Status WeightsImport::Impl::ask(ipc::LoanStep step) {
  ipc::LoanRequest request;
  request.step = step;
  request.first_allocation = static_cast<std::uint32_t>(sizes_.size());
  request.first_tensor = static_cast<std::uint32_t>(infos_.size());
  const Status sent = socket_.send(ipc::encode(request));
  // One that has closed may have said why: that is heard first.
  if (!sent && sent.error().code != ipc::ErrorCode::kPeerDied) return lost(sent.error());
  return ipc::ok();
}

Result<ipc::Packet> WeightsImport::Impl::hear(Deadline deadline,
                                              const std::atomic<bool>* cancelled) {
  while (true) {
    // wait: an answer of the lender; deadline, of the caller, in steps of kLoanLook; its end
    auto packet = socket_.receive(Deadline::after(kLoanLook).earlier(deadline));
    if (packet) return packet;
    if (packet.error().code == ipc::ErrorCode::kPeerDied) {
      // A reset, by a lender that closed before it read the question, comes before what it said.
      auto said = socket_.try_receive();
      if (said && *said) return std::move(**said);
    }
    if (packet.error().code != ipc::ErrorCode::kTimeout) return lost(packet.error());
    if (cancelled != nullptr && cancelled->load()) return given_up();
    if (deadline.expired()) {
      return KVFERRY_ERROR(kTimeout, "{} did not answer by the deadline; is it stopped?", lender());
    }
  }
}

Status WeightsImport::Impl::take(Deadline deadline, const std::atomic<bool>& cancelled) {
  for (bool first = true; first || !complete(); first = false) {
    // One that answers at once, but a little each time, gives hear() nothing to wait for.
    if (cancelled.load()) return given_up();
    if (!first && deadline.expired()) {
      return KVFERRY_ERROR(kTimeout, "{} had described {} of {} tensors by the deadline", lender(),
                           infos_.size(), total_tensors_);
    }
    KVFERRY_TRY(ask(ipc::LoanStep::kTake));
    KVFERRY_ASSIGN(ipc::Packet packet, hear(deadline, &cancelled));
    if (const Status taken = take_part(std::move(packet), first); !taken) {
      ipc::Error error = taken.error();
      error.message = fmt::format("{}: {}", lender(), error.message);
      return error;
    }
  }
  return ipc::ok();
}

Status WeightsImport::Impl::take_part(ipc::Packet packet, bool first) {
  KVFERRY_ASSIGN(LoanPart part, ipc::decode<LoanPart>(packet.bytes, "LoanPart"));
  if (part.version != ipc::kWireVersion) {
    return KVFERRY_ERROR(kVersionMismatch, "it speaks version {}, this worker {}: use one release",
                         part.version, ipc::kWireVersion);
  }
  if (part.refused) return refusal_of(*part.refused);
  if (first) {
    total_allocations_ = part.total_allocations;
    total_tensors_ = part.total_tensors;
  }
  if (part.total_allocations != total_allocations_ || part.total_tensors != total_tensors_ ||
      total_allocations_ > LoanPart::kMaxAllocations || total_tensors_ > ipc::kMaxWireElements) {
    return KVFERRY_ERROR(kProtocol, "it lends {} tensors in {} allocations, before it was {} in {}",
                         part.total_tensors, part.total_allocations, total_tensors_,
                         total_allocations_);
  }
  if (part.allocations.size() > total_allocations_ - sizes_.size() ||
      part.tensors.size() > total_tensors_ - infos_.size() ||
      (part.allocations.empty() && part.tensors.empty() && !complete())) {
    return KVFERRY_ERROR(kProtocol,
                         "{} allocations at {} of {} and {} tensors at {} of {} do not follow",
                         part.allocations.size(), sizes_.size(), total_allocations_,
                         part.tensors.size(), infos_.size(), total_tensors_);
  }
  KVFERRY_TRY(take_handles(part, std::move(packet.fds)));
  for (ipc::LentTensor& tensor : part.tensors) KVFERRY_TRY(take_tensor(tensor));
  return ipc::ok();
}

Status WeightsImport::Impl::take_handles(LoanPart& part, std::vector<ipc::UniqueFd> fds) {
  owes_ = owes_ || !part.allocations.empty();
  std::size_t next_fd = 0;
  for (ipc::LentAllocation& lent : part.allocations) {
    if (lent.size_bytes == 0 || lent.token.size() > LoanPart::kMaxTokenBytes ||
        (lent.has_fd && next_fd == fds.size())) {
      return KVFERRY_ERROR(kProtocol,
                           "allocation {}: {} bytes, a token of {} bytes, descriptor {} of {}",
                           sizes_.size(), lent.size_bytes, lent.token.size(), next_fd, fds.size());
    }
    ipc::ExportedHandle handle;
    handle.kind = lent.kind;
    handle.size_bytes = lent.size_bytes;
    handle.token = std::move(lent.token);
    if (lent.has_fd) handle.fd = std::move(fds[next_fd++]);
    handles_.push_back(std::move(handle));
    sizes_.push_back(lent.size_bytes);
  }
  if (next_fd == fds.size()) return ipc::ok();
  return KVFERRY_ERROR(kProtocol, "{} descriptors came for {} allocations", fds.size(), next_fd);
}

// Allocations come before the tensors that lie in them.
Status WeightsImport::Impl::take_tensor(ipc::LentTensor& tensor) {
  if (tensor.name.size() > LoanPart::kMaxNameBytes) {
    return KVFERRY_ERROR(kProtocol, "tensor '{}': a name of {} bytes; at most {} are taken",
                         shown(tensor.name), tensor.name.size(), LoanPart::kMaxNameBytes);
  }
  TensorInfo info{tensor.name, tensor.dtype, tensor.shape, 0, tensor.size_bytes};
  KVFERRY_TRY(check_tensor(info));
  if (tensor.size_bytes > 0 &&
      (tensor.allocation >= sizes_.size() || tensor.offset > sizes_[tensor.allocation] ||
       tensor.size_bytes > sizes_[tensor.allocation] - tensor.offset)) {
    return KVFERRY_ERROR(
        kProtocol, "tensor '{}': [{}, + {}) of allocation {}, which has {} bytes ({} are known)",
        shown(tensor.name), tensor.offset, tensor.size_bytes, tensor.allocation,
        tensor.allocation < sizes_.size() ? sizes_[tensor.allocation] : 0, sizes_.size());
  }
  places_.push_back({tensor.allocation, tensor.offset});
  infos_.push_back({std::move(tensor.name), std::move(tensor.dtype), std::move(tensor.shape),
                    tensor.size_bytes});
  return ipc::ok();
}

Status WeightsImport::Impl::map(ipc::Device& device) {
  for (ipc::ExportedHandle& handle : std::exchange(handles_, {})) {
    auto memory = device.import(std::move(handle), nullptr);
    if (!memory) {
      mapped_.clear();
      ipc::Error error = memory.error();
      error.message = fmt::format("{}: its memory cannot be mapped on {}: {}", lender(),
                                  device.name(), error.message);
      return error;
    }
    mapped_.push_back(std::move(memory).value());
  }
  return ipc::ok();
}

ipc::DevicePtr WeightsImport::Impl::address(std::size_t tensor) const {
  if (infos_[tensor].size_bytes == 0) return {};
  const Place& place = places_[tensor];
  return mapped_[place.allocation]->address() + place.offset;
}

Status WeightsImport::Impl::check_lender() const {
  if (!process_.has_died()) return ipc::ok();
  return KVFERRY_ERROR(kPeerDied, "{} died: nothing of its weights is used", lender());
}

Status WeightsImport::Impl::give_back(Deadline deadline) {
  handles_.clear();
  Status released = ipc::ok();
  for (const auto& memory : std::exchange(mapped_, {})) {
    if (Status one = memory->release(); !one && released) released = std::move(one);
  }
  KVFERRY_TRY(released);
  owes_ = false;
  KVFERRY_TRY(ask(ipc::LoanStep::kReturn));
  KVFERRY_TRY(hear(deadline, nullptr));
  return ipc::ok();
}

WeightsImport::WeightsImport(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
WeightsImport::WeightsImport(WeightsImport&&) noexcept = default;
WeightsImport& WeightsImport::operator=(WeightsImport&&) noexcept = default;
WeightsImport::~WeightsImport() = default;

Result<WeightsImport> WeightsImport::open(const std::filesystem::path& socket,
                                          Deadline deadline,
                                          const std::atomic<bool>& cancelled) {
  const std::string name = socket.stem().string();
  auto connected = ipc::PacketSocket::connect(socket, deadline);
  if (!connected && connected.error().code == ipc::ErrorCode::kNotFound) {
    return KVFERRY_ERROR(kNotFound,
                         "nobody lends weights as '{}': start 'kvferry export-weights --name {}' "
                         "in this instance, or name another source",
                         name, name);
  }
  if (!connected) return connected.error();
  KVFERRY_ASSIGN(ipc::ProcessRef lender, connected->peer());
  auto impl = std::make_unique<Impl>(name, std::move(connected).value(), std::move(lender));
  ipc::log_info("weights: {} is asked for what it lends", impl->lender());
  KVFERRY_TRY(impl->take(deadline, cancelled));
  return WeightsImport(std::move(impl));
}

const std::vector<LentTensorInfo>& WeightsImport::tensors() const noexcept {
  return impl_->tensors();
}
std::string WeightsImport::lender() const { return impl_->lender(); }
Status WeightsImport::map(ipc::Device& device) { return impl_->map(device); }
ipc::DevicePtr WeightsImport::address(std::size_t tensor) const { return impl_->address(tensor); }
Status WeightsImport::check_lender() const { return impl_->check_lender(); }
Status WeightsImport::give_back(Deadline deadline) { return impl_->give_back(deadline); }

}  // namespace kvferry::worker
