// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// The file of a name's lock, which says who holds it: any text may be in it when its holder is
// gone. The name must then be ours.
#include "fuzz.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "scratch.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry;
  static const fuzz::ScratchDir scratch;
  const std::filesystem::path name = scratch.path() / "name";
  fuzz::write_file(name.native() + ".lock", fuzz::Input(data, size).text());
  const auto lock = ipc::NameLock::acquire(name);
  KVFERRY_CHECK(lock.has_value(), lock ? "" : lock.error().to_string());
  return 0;
}
