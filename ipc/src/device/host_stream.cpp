// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "device/host_stream.hpp"

#include "device/stream_arguments.hpp"
#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/log.hpp"

#include <fcntl.h>

#include <utility>

namespace kvferry::ipc {
namespace {

constexpr std::size_t kQueueLimit = 1024;
constexpr std::chrono::seconds kRoomPatience{30};
constexpr std::chrono::seconds kDrainPatience{10};

class HostRecordedWork final : public RecordedWork {
 public:
  explicit HostRecordedWork(host_work::List list)
      : list_(std::make_shared<const host_work::List>(std::move(list))) {}
  [[nodiscard]] const std::shared_ptr<const host_work::List>& list() const { return list_; }

 private:
  std::shared_ptr<const host_work::List> list_;
};

/// The stream that record() hands to the body.
class HostRecorder final : public HostOperations {
 public:
  explicit HostRecorder(std::string device_name) : HostOperations(std::move(device_name)) {}

  [[nodiscard]] Result<std::unique_ptr<RecordedWork>> record(
      const std::function<Status(Stream&)>& /*body*/) override {
    return not_recordable(device_name(), "record");
  }
  [[nodiscard]] Status launch(const RecordedWork& /*work*/) override {
    return not_recordable(device_name(), "launch");
  }
  [[nodiscard]] Status notify(int /*event_fd*/) override {
    return not_recordable(device_name(), "notify");
  }
  [[nodiscard]] Result<bool> query() override { return not_recordable(device_name(), "query"); }

  [[nodiscard]] host_work::List list() && { return std::move(list_); }

 private:
  [[nodiscard]] Status take(host_work::Item item) override {
    list_.items.push_back(std::move(item));
    return ok();
  }

  host_work::List list_;
};

}  // namespace

HostStream::HostStream(std::string device_name) : HostOperations(std::move(device_name)) {
  thread_.emplace("kvf-stream", OwnThread::Runs::kOurCode, [this] { run(); });
}

HostStream::~HostStream() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    // wait: work of a stream that ends; kDrainPatience; nothing
    const bool drained = has_room_.wait_until(lock, Deadline::after(kDrainPatience).when(),
                                              [&] { return queue_.empty() && !running_; });
    if (!drained) {
      log_error("{}: a stream ends with {} items of work dropped after {} s", device_name(),
                queue_.size(), kDrainPatience.count());
      queue_.clear();
      gives_up_ = true;
    }
    stopping_ = true;
  }
  has_work_.notify_all();
  // wait: the stream's own thread; wait_end() gives it kEndsWithin; it runs one item at most
  thread_->wait_end();
}

void HostStream::run() {
  host_work::set_end(&gives_up_);
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    // wait-idle: work; take() or the end of the stream; thread kvf-stream
    has_work_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    {
      const host_work::Item work = std::move(queue_.front());
      queue_.pop_front();
      running_ = true;
      if (const auto* notification = std::get_if<host_work::Notify>(&work)) {
        // One step under the lock: whom it wakes finds the stream idle, and who finds the stream
        // idle finds every eventfd written. Between the two an owner of the eventfd could use it
        // for new work, which the late write would then end.
        notification->run();
        running_ = false;
        has_room_.notify_all();
        continue;
      }
      lock.unlock();
      has_room_.notify_all();
      std::visit([](const auto& item) { item.run(); }, work);
    }
    lock.lock();
    running_ = false;
    has_room_.notify_all();
  }
}

Status HostStream::take(host_work::Item item) {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    // wait: room in the queue of the stream; kRoomPatience; nothing
    if (!has_room_.wait_until(lock, Deadline::after(kRoomPatience).when(),
                              [&] { return queue_.size() < kQueueLimit; })) {
      return KVFERRY_ERROR(kBusy, "{}: a stream holds {} items of work and none ended in {} s",
                           device_name(), queue_.size(), kRoomPatience.count());
    }
    queue_.push_back(std::move(item));
  }
  has_work_.notify_one();
  return ok();
}

Result<std::unique_ptr<RecordedWork>> HostStream::record(
    const std::function<Status(Stream&)>& body) {
  HostRecorder recorder(device_name());
  KVFERRY_TRY(body(recorder));
  return std::unique_ptr<RecordedWork>(
      std::make_unique<HostRecordedWork>(std::move(recorder).list()));
}

Status HostStream::launch(const RecordedWork& work) {
  const auto* recorded = dynamic_cast<const HostRecordedWork*>(&work);
  if (recorded == nullptr) {
    return KVFERRY_ERROR(kInvalidArgument, "{}: launch of what no host device recorded",
                         device_name());
  }
  return take(host_work::Launch{recorded->list()});
}

Status HostStream::notify(int event_fd) {
  // A copy: the number may mean another file by the time the stream gets there.
  UniqueFd copy(::fcntl(event_fd, F_DUPFD_CLOEXEC, 0));
  if (!copy.valid()) return KVFERRY_ERRNO("{}: eventfd {}", device_name(), event_fd);
  return take(host_work::Notify{std::move(copy)});
}

Result<bool> HostStream::query() {
  const std::lock_guard<std::mutex> guard(mutex_);
  return queue_.empty() && !running_;
}

}  // namespace kvferry::ipc
