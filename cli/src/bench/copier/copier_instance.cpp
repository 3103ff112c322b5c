// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/copier/copier_instance.hpp"

#include "kvferry/ipc/base/size.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""ms;

constexpr int kRepliesOfARound = 64;
constexpr ipc::Duration kStartLook = 100ms;
/// No measurement's handle: those begin at 1, and those of the other way at 2^32.
constexpr std::uint64_t kMarkHandle = 0;
constexpr std::uint32_t kMarkFactor = 2'654'435'761;

std::byte mark_at(std::size_t offset) {
  return static_cast<std::byte>((static_cast<std::uint32_t>(offset) * kMarkFactor) >> 24U);
}

BenchTarget::Options with_pool_of(BenchTarget::Options options, const InstancePlan& plan) {
  options.instance = plan.instance;
  options.host_bytes = plan.host_bytes;
  return options;
}

}  // namespace

CopierInstance::CopierInstance(ipc::EventLoop& loop,
                               const RunDir& dir,
                               InstancePlan plan,
                               OwnStrategy strategy,
                               const ipc::ArenaLayout& layout,
                               Options options)
    : BenchTarget(loop, dir, with_pool_of(std::move(options), plan)),
      plan_(std::move(plan)),
      strategy_(strategy),
      fingerprint_(layout.fingerprint),
      arena_bytes_(layout.total_bytes()),
      places_(layout, plan_.host_bytes) {}

CopierInstance::~CopierInstance() { let_go(); }

ipc::Status CopierInstance::start() {
  const ipc::Deadline deadline =
      ipc::Deadline::after(start_limit(options_.patience, plan_.host_bytes));
  KVFERRY_ASSIGN(runtime_dir_, ipc::RuntimeDir::open(dir_.path().native(), plan_.instance));
  const std::filesystem::path socket = runtime_dir_->path() / kName;
  KVFERRY_ASSIGN(listener_, ipc::PacketListener::listen(socket));
  KVFERRY_ASSIGN(pool_fd_, ipc::SharedMemory::create_pool("kvferry-bench", plan_.host_bytes, true));
  KVFERRY_ASSIGN(pool_, ipc::SharedMemory::map_pool(pool_fd_, plan_.host_bytes));
  loop_.watch(listener_->fd(), [this] { on_connection(); });
  KVFERRY_TRY(processes_->start({copier_child(plan_, dir_.path(), socket)}));
  processes_->observe();
  while (!ready_) {
    if (over_) return *over_;
    if (deadline.expired()) return KVFERRY_ERROR(kTimeout, "no copier was ready in time");
    loop_.run_once(ipc::Deadline::after(kStartLook).earlier(deadline));
  }
  processes_->observe();
  return ipc::ok();
}

void CopierInstance::on_connection() {
  auto accepted = listener_->try_accept();
  if (!accepted) {
    over_ = accepted.error();
    return;
  }
  if (!accepted->has_value()) return;
  // Its predecessor is dead, whether its end of file was seen already or not.
  on_lost(KVFERRY_ERROR(kPeerDied, "another copier took its place"));
  socket_ = std::move(**accepted);
  loop_.watch(socket_.fd(), [this] { on_readable(); });
  if (const ipc::Status greeted = greet(); !greeted) on_lost(greeted.error());
}

ipc::Status CopierInstance::greet() {
  const int pool = pool_fd_.get();
  return socket_.send(ipc::encode(CopierSetUp{strategy_, plan_.host_bytes}), {&pool, 1});
}

void CopierInstance::on_readable() {
  for (int i = 0; i < kRepliesOfARound && socket_.valid(); ++i) {
    const auto packet = socket_.try_receive();
    if (!packet) return on_lost(packet.error());
    if (!packet->has_value()) return;
    if (const ipc::Status taken = on_packet(**packet); !taken) return on_lost(taken.error());
  }
}

ipc::Status CopierInstance::on_packet(const ipc::Packet& packet) {
  if (!ready_) {
    KVFERRY_ASSIGN(const CopierReady ready, ipc::decode<CopierReady>(packet.bytes, "CopierReady"));
    if (ready.fingerprint != fingerprint_ || ready.arena_bytes != arena_bytes_) {
      return KVFERRY_ERROR(kGeometryMismatch, "the copier has an arena of {} bytes, expected {}",
                           ready.arena_bytes, arena_bytes_);
    }
    ready_ = true;
    return ipc::ok();
  }
  KVFERRY_ASSIGN(const CopyReply reply, ipc::decode<CopyReply>(packet.bytes, "CopyReply"));
  const bool unsent = !waiting_.empty() && reply.id >= waiting_.front().id;
  if (unsent || !requests_.contains(reply.id)) {
    return KVFERRY_ERROR(kProtocol, "a reply to request {}, which is not out", reply.id);
  }
  end_request(reply.id, reply.error);
  send_waiting();
  return ipc::ok();
}

void CopierInstance::end_request(std::uint64_t id, const std::optional<ipc::Error>& error) {
  const std::uint64_t number = requests_.at(id);
  requests_.erase(id);
  Job& job = jobs_.at(number);
  if (error && !job.error) job.error = error;
  if (--job.requests > 0) return;
  ended_.push_back({number, job.bytes, std::move(job.error)});
  jobs_.erase(number);
}

void CopierInstance::on_lost(const ipc::Error& why) {
  if (socket_.valid()) loop_.unwatch(socket_.fd());
  socket_ = ipc::PacketSocket();
  ready_ = false;
  requests_.clear();
  waiting_.clear();
  const ipc::Error died = KVFERRY_ERROR(kPeerDied, "the copier is gone: {}", why.to_string());
  for (const auto& [number, job] : jobs_) ended_.push_back({number, job.bytes, died});
  jobs_.clear();
}

ipc::Result<std::uint64_t> CopierInstance::submit(std::uint64_t handle,
                                                  const std::vector<worker::SequenceItem>& blocks,
                                                  bool to_host) {
  if (!ready_) return KVFERRY_ERROR(kNotReady, "no copier is there");
  KVFERRY_ASSIGN(const std::vector<std::uint64_t>* places, places_.of(handle, blocks));
  const std::uint64_t number = ++last_job_;
  Job job;
  for (std::size_t next = 0; next < blocks.size();) {
    CopyRequest& request = waiting_.emplace_back();
    request.id = ++last_request_;
    request.direction =
        to_host ? ipc::CopyDirection::kDeviceToHost : ipc::CopyDirection::kHostToDevice;
    const std::size_t end = std::min(blocks.size(), next + kMostCopyItems);
    request.items.reserve(end - next);
    for (; next < end; ++next) {
      const worker::SequenceItem& item = blocks[next];
      request.items.push_back({item.group, item.block, (*places)[next]});
      job.bytes += places_.packed_bytes(item.group);
    }
    requests_.emplace(request.id, number);
    ++job.requests;
  }
  jobs_.emplace(number, std::move(job));
  send_waiting();
  return number;
}

// A full socket holds requests that will be answered: then the next ones go.
void CopierInstance::send_waiting() {
  while (!waiting_.empty() && requests_.size() - waiting_.size() < kMostCopyRequests) {
    const ipc::Status sent = socket_.send(ipc::encode(waiting_.front()));
    if (!sent) return;  // full, or gone: its end of file comes
    waiting_.pop_front();
  }
}

void CopierInstance::take(const std::function<void(const Ended&)>& each) {
  for (const Ended& ended : std::exchange(ended_, {})) each(ended);
}

ipc::Status CopierInstance::drop(std::uint64_t handle) {
  places_.drop(handle);
  return ipc::ok();
}

ipc::Status CopierInstance::run_alone(const worker::SequenceItem& block, bool to_host) {
  KVFERRY_ASSIGN(const std::uint64_t number, submit(kMarkHandle, {block}, to_host));
  std::optional<Ended> mine;
  KVFERRY_TRY(run_until(
      [&] {
        take([&](const Ended& ended) {
          if (ended.job == number) mine = ended;
        });
        return mine.has_value();
      },
      "the copy of a mark"));
  if (mine->error) return *mine->error;
  return ipc::ok();
}

ipc::Status CopierInstance::write_mark(const worker::SequenceItem& block) {
  KVFERRY_ASSIGN(const std::vector<std::uint64_t>* places, places_.of(kMarkHandle, {block}));
  std::byte* bytes = pool_.data() + places->front();
  for (std::size_t i = 0; i < places_.packed_bytes(block.group); ++i) bytes[i] = mark_at(i);
  return run_alone(block, false);
}

ipc::Result<bool> CopierInstance::has_mark(const worker::SequenceItem& block) {
  KVFERRY_ASSIGN(const std::vector<std::uint64_t>* places, places_.of(kMarkHandle, {block}));
  const std::span<std::byte> bytes(pool_.data() + places->front(),
                                   places_.packed_bytes(block.group));
  std::fill(bytes.begin(), bytes.end(), std::byte{0});
  KVFERRY_TRY(run_alone(block, true));
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i] != mark_at(i)) return false;
  }
  return true;
}

void CopierInstance::let_go() {
  if (socket_.valid()) loop_.unwatch(socket_.fd());
  socket_ = ipc::PacketSocket();
  if (listener_) loop_.unwatch(listener_->fd());
  listener_.reset();
  runtime_dir_.reset();
  pool_ = ipc::SharedMapping();
  pool_fd_ = ipc::UniqueFd();
}

Leavings CopierInstance::end(const DeviceProbe& devices, bool failed) {
  processes_->observe();
  let_go();
  return end_processes(devices, failed);
}

}  // namespace kvferry::cli
