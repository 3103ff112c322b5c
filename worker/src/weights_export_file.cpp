// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/weights_export_file.hpp"

#include "kvferry/ipc/base/keep.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "kvferry/ipc/device/await_stream.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "make_stream.hpp"
#include "safetensors.hpp"

#include <algorithm>
#include <array>
#include <memory>
#include <utility>
#include <vector>

namespace kvferry::worker {
namespace {

using std::chrono_literals::operator""s;

constexpr std::uint64_t kPieceBytes = 8ULL << 20;
/// As frameworks align tensors.
constexpr std::uint64_t kPlaceBytes = 512;
/// Of one piece on its way to the device.
constexpr ipc::Duration kPieceTime = 30s;

/// The tensors of a file in one allocation.
struct LoadedFile {
  std::unique_ptr<ipc::DeviceMemory> memory;
  std::vector<ExportedTensor> tensors;
};

ipc::Status copy_tensor(const SafetensorsFile& file,
                        const TensorInfo& tensor,
                        ipc::DevicePtr target,
                        ipc::Stream& stream,
                        ipc::PinnedBuffer& bounce) {
  ipc::EventFd copied;
  for (std::uint64_t done = 0; done < tensor.size_bytes; done += kPieceBytes) {
    const std::uint64_t length = std::min(kPieceBytes, tensor.size_bytes - done);
    KVFERRY_TRY(file.read(tensor.offset + done, {bounce.data(), length}));
    const std::array ops{ipc::CopyOp{bounce.data(), target + done, length}};
    KVFERRY_TRY(stream.copy(ipc::CopyDirection::kHostToDevice, ops, ipc::CopyMode::kEach));
    KVFERRY_TRY(stream.notify(copied.fd()));
    KVFERRY_TRY(await_stream(stream, copied, ipc::Deadline::after(kPieceTime),
                             "copying weights to the device"));
  }
  return ipc::ok();
}

LoadedFile load_file(ipc::Device& device, const WeightsExportConfig& config) {
  const SafetensorsFile file = value_or_throw(SafetensorsFile::open(config.file));
  std::uint64_t total = 0;
  for (const TensorInfo& tensor : file.tensors()) {
    total += ipc::align_up(tensor.size_bytes, kPlaceBytes);
  }
  LoadedFile loaded;
  if (total > 0) loaded.memory = value_or_throw(device.allocate(total, config.handles, nullptr));
  const auto bounce = value_or_throw(device.make_pinned_buffer(kPieceBytes));
  const auto stream = make_stream(device, ipc::StreamPriority::kNormal);
  std::uint64_t place = 0;
  for (const TensorInfo& tensor : file.tensors()) {
    ExportedTensor exported{tensor.name, tensor.dtype, tensor.shape, {}};
    if (tensor.size_bytes > 0) {
      exported.address = loaded.memory->address() + place;
      if (const auto copied = copy_tensor(file, tensor, exported.address, *stream, *bounce);
          !copied) {
        throw ipc::Exception(copied.error());
      }
    }
    place += ipc::align_up(tensor.size_bytes, kPlaceBytes);
    loaded.tensors.push_back(std::move(exported));
  }
  return loaded;
}

}  // namespace

void run_weights_export(const WeightsExportConfig& config, const std::function<void()>& ready) {
  ipc::SignalFd signals;  // Before every thread, so that all of them inherit the mask.
  ipc::EventLoop loop;
  const auto device = ipc::open_device(config.device);
  LoadedFile loaded = load_file(*device, config);
  auto exporter = value_or_throw(WeightsExporter::start(*device, config.lend, loaded.tensors));
  loop.watch(signals.fd(), [&] {
    if (signals.take() != 0) loop.stop();
  });
  ready();
  loop.run();
  const ipc::Status closed = exporter->close(ipc::Deadline::after(config.return_deadline));
  exporter.reset();
  if (closed) return;
  ipc::keep_until_process_end(std::move(loaded.memory));
  throw ipc::Exception(closed.error());
}

}  // namespace kvferry::worker
