// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// One process that uses a host device, told what to do line by line. Descriptors travel over the
// socket at 3; children made by "fork" live until the pipe at 4 ends.
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"
#include "support/child_side.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace kvferry::ipc {
namespace {

constexpr int kSocket = 3;
constexpr int kLifeline = 4;

class Child {
 public:
  explicit Child(const DeviceSpec& spec) : device_(open_device(spec)), socket_(UniqueFd(kSocket)) {}

  std::string obey(const std::string& line) {
    std::istringstream words(line);
    std::string verb;
    std::string kind;
    std::uint64_t number = 0;
    words >> verb;
    if (verb == "alloc" || verb == "fill") words >> kind;
    words >> number;
    if (verb == "alloc") return keep(device_->allocate(number, kind_of(kind), nullptr));
    if (verb == "reserve") return reserve(number);
    if (verb == "alloc_at") return keep(device_->allocate(number, HandleKind::kVmm, range_.get()));
    if (verb == "fill") return fill(kind_of(kind), number);
    if (verb == "export") return send(*memory_.at(number));
    if (verb == "import") return receive();
    if (verb == "release") return describe(memory_.at(number)->release());
    if (verb == "drop") return memory_.at(number).reset(), "ok";
    if (verb == "write") return *byte(number) = 42, "ok";
    if (verb == "read") return fmt::format("ok {}", *byte(number));
    if (verb == "free") return fmt::format("ok {}", device_->memory_info().value().free_bytes);
    if (verb == "fork") return start_fork();
    return "what is " + line;
  }

 private:
  static HandleKind kind_of(const std::string& text) {
    return text == "legacy" ? HandleKind::kLegacy : HandleKind::kVmm;
  }
  static std::string describe(const Status& status) {
    return status.has_value() ? "ok" : "error " + status.error().to_string();
  }
  volatile unsigned char* byte(std::size_t index) {
    return static_cast<volatile unsigned char*>(memory_.at(index)->address().raw());
  }

  std::string keep(Result<std::unique_ptr<DeviceMemory>> memory) {
    if (!memory.has_value()) return "error " + memory.error().to_string();
    memory_.push_back(std::move(memory).value());
    return fmt::format("ok {}", memory_.back()->address().address);
  }

  std::string reserve(std::uint64_t size) {
    range_ = device_->reserve(size).value();
    return fmt::format("ok {}", range_->address().address);
  }

  /// Allocates pieces until refused; says how many it got.
  std::string fill(HandleKind kind, std::uint64_t piece) {
    std::size_t count = 0;
    for (;;) {
      auto memory = device_->allocate(piece, kind, nullptr);
      if (!memory.has_value()) break;
      memory_.push_back(std::move(memory).value());
      ++count;
    }
    return fmt::format("ok {}", count);
  }

  std::string send(DeviceMemory& memory) {
    const ExportedHandle handle = memory.export_handle().value();
    const std::string text =
        fmt::format("{} {}", static_cast<unsigned>(handle.kind), handle.size_bytes);
    const std::vector<std::uint8_t> bytes(text.begin(), text.end());
    const std::array<int, 1> fds = {handle.fd.get()};
    return describe(socket_.send(bytes, fds));
  }

  std::string receive() {
    auto packet = socket_.receive(Deadline::after(std::chrono::seconds(20))).value();
    std::istringstream words(std::string(packet.bytes.begin(), packet.bytes.end()));
    unsigned kind = 0;
    ExportedHandle handle;
    words >> kind >> handle.size_bytes;
    handle.kind = static_cast<HandleKind>(kind);
    handle.fd = std::move(packet.fds.at(0));
    return keep(device_->import(std::move(handle), nullptr));
  }

  /// A child without exec, as some libraries make them: it shares all mappings.
  static std::string start_fork() {
    const pid_t pid = ::fork();
    if (pid == 0) {
      char ignored = 0;
      const ssize_t count = ::read(kLifeline, &ignored, 1);
      ::_exit(count == 0 ? 0 : 1);
    }
    return fmt::format("ok {}", pid);
  }

  std::unique_ptr<Device> device_;
  PacketSocket socket_;
  std::unique_ptr<AddressRange> range_;
  std::vector<std::unique_ptr<DeviceMemory>> memory_;
};

int run(const std::string& spec_text) {
  test::disable_core_dumps();
  Child child(DeviceSpec::parse(spec_text).value());
  test::say("ready");
  while (const auto line = test::hear()) {
    if (*line == "end") break;
    test::say(child.obey(*line));
  }
  return 0;
}

}  // namespace
}  // namespace kvferry::ipc

int main(int argc, char** argv) {
  if (argc != 2) return 64;
  try {
    return kvferry::ipc::run(argv[1]);
  } catch (const std::exception& error) {
    kvferry::test::say(std::string("error ") + error.what());
    return 1;
  }
}
