// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// The command, with a simulated device that breaks for good at one of its copies: the linker puts
// this where processes open their devices. KVFERRY_TEST_BREAKS=copy:N or rows:N says at which copy
// (of slots and blocks, or of rows) from the process's beginning on.
#include "kvferry/ipc/os/process.hpp"
#include "support/faulty_device.hpp"

#include <memory>
#include <string>

extern "C" {
std::unique_ptr<kvferry::ipc::Device> KVFERRY_REAL_OPEN_DEVICE(
    const kvferry::ipc::DeviceSpec& spec);
std::unique_ptr<kvferry::ipc::Device> KVFERRY_WRAP_OPEN_DEVICE(
    const kvferry::ipc::DeviceSpec& spec);

std::unique_ptr<kvferry::ipc::Device> KVFERRY_WRAP_OPEN_DEVICE(
    const kvferry::ipc::DeviceSpec& spec) {
  using namespace kvferry;
  auto real = KVFERRY_REAL_OPEN_DEVICE(spec);
  const std::string planned = ipc::environment("KVFERRY_TEST_BREAKS");
  if (planned.empty()) return real;
  static test::FaultPlan plan;
  test::DeviceFault fault;
  fault.call = planned.starts_with("rows") ? test::DeviceCall::kCopyRows : test::DeviceCall::kCopy;
  fault.number = std::stoull(planned.substr(planned.find(':') + 1));
  fault.kind = test::FaultKind::kBreaks;
  fault.text = "uncorrectable memory error, as planned";
  plan.fail(fault);
  return std::make_unique<test::FaultyDevice>(std::move(real), plan);
}
}
