// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// The documentation's example of an engine's worker, with a mover's side that attaches to it.
#include "ipc/os/temp_dir.hpp"
#include "kvferry/ipc/lease/lease.hpp"
#include "multiproc/mover_mapping.hpp"
#include "support/child_process.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

namespace kvferry {
namespace {

using test::soon;

TEST(ExampleWorkerTest, RegistersItsTensorsAndServesUntilItsInputEnds) {
  const test::ShortTempDir temp;
  const std::string name = fmt::format("example-{}", ::getpid());
  const std::string device_text = fmt::format("host:{}:64MiB", name);
  test::ChildProcess worker({.program = test::sibling_program("example_worker"),
                             .arguments = {device_text},
                             .environment = {"KVFERRY_RUNTIME_DIR=" + temp.path().string()}});
  ASSERT_EQ(worker.read_line(soon()), "registered: epoch 1, 64 device blocks")
      << worker.stderr_text();

  const auto geometry = ipc::load_geometry("tiny", 1).value();
  const auto device = ipc::open_device(ipc::DeviceSpec::parse(device_text).value());
  const auto dir = ipc::RuntimeDir::open(temp.path().string(), "default").value();
  ipc::LeaseOptions options;
  options.identity.instance = "default";
  options.identity.engine = "default";
  options.identity.self = ipc::ProcessKind::kMover;
  options.identity.handles = ipc::HandleKind::kLegacy;
  options.identity.fingerprint = geometry.fingerprint(ipc::ArenaOrder::kLayerFirst);
  options.identity.incarnation = ipc::IncarnationId::random();
  test::MoverMapping mapping;
  ipc::LeaseAttacher mover(options, dir, *device, geometry, mapping, [](const ipc::LeaseView&) {});
  const auto mapped = mover.wait_mapped(ipc::Epoch{1}, soon());
  ASSERT_TRUE(mapped.has_value()) << mapped.error().to_string();
  const ipc::ArenaLayout& layout = mapping.arena()->layout();
  EXPECT_EQ(layout.regions.size(), geometry.groups[0].regions.size());
  EXPECT_LT(layout.segment_bytes.size(), layout.regions.size()) << "tensors share segments";

  ASSERT_TRUE(worker.write_line("go"));
  EXPECT_EQ(worker.read_line(soon()), "step ran on epoch 1");
  worker.close_stdin();
  EXPECT_EQ(worker.wait(soon()), test::ChildExit::exited(0)) << worker.stderr_text();
  EXPECT_EQ(ipc::host_device_used_bytes(name).value(), 0U);
}

}  // namespace
}  // namespace kvferry
