// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// A geometry in TOML. One that is accepted must be valid, be the same after a round trip over the
// wire, and be something that an arena can be planned for.
#include "fuzz.hpp"
#include "kvferry/ipc/model/arena_layout.hpp"
#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "scratch.hpp"

namespace kvferry::fuzz {
namespace {

void plan(const ipc::Geometry& geometry) {
  constexpr std::size_t kMostRegions = 512;  // More only takes longer.
  std::size_t regions = 0;
  for (const ipc::GroupSpec& group : geometry.groups) regions += group.regions.size();
  if (regions > kMostRegions) return;
  for (const auto order : {ipc::ArenaOrder::kLayerFirst, ipc::ArenaOrder::kLayerFirstMany,
                           ipc::ArenaOrder::kBlockFirst}) {
    ipc::ArenaOptions options;
    options.order = order;
    options.gpu_blocks = 64;
    const auto layout = ipc::plan_arena(geometry, options);
    if (!layout) continue;
    const ipc::Status valid = layout->validate(geometry);
    KVFERRY_CHECK(valid.has_value(), valid ? "" : valid.error().to_string());
  }
}

}  // namespace
}  // namespace kvferry::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry;
  static const fuzz::ScratchDir scratch;
  static const std::filesystem::path file = scratch.path() / "geometry.toml";
  fuzz::Input input(data, size);
  const std::uint32_t ranks = 1U << (input.byte() % 4U);
  fuzz::write_file(file, input.text());
  const auto geometry = ipc::load_geometry(file.native(), ranks);
  if (!geometry) return 0;
  const ipc::Status valid = geometry->validate();
  KVFERRY_CHECK(valid.has_value(), valid ? "" : valid.error().to_string());
  fuzz::round_trip(*geometry);
  fuzz::plan(*geometry);
  return 0;
}
