// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// The least that a user of an installed kvferry does: sizes, digests and a client. No manager runs
// in the fresh directory, so the client must say just that, within its deadline.
#include "kvferry/ipc/base/size.hpp"
#include "kvferry/worker/client.hpp"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

int main() {
  using kvferry::ipc::Deadline;
  using kvferry::ipc::ErrorCode;

  const auto size = kvferry::ipc::parse_size("64KiB");
  if (!size || *size != 65536) {
    std::fputs("parse_size(64KiB) is not 65536\n", stderr);
    return EXIT_FAILURE;
  }

  std::string directory = std::filesystem::temp_directory_path() / "kvferry-consumer-XXXXXX";
  if (::mkdtemp(directory.data()) == nullptr) {
    std::perror("mkdtemp");
    return EXIT_FAILURE;
  }
  kvferry::worker::ClientOptions options;
  options.runtime_dir = directory;
  options.identity.weights = kvferry::ipc::Digest::random();
  const auto client =
      kvferry::worker::Client::connect(options, Deadline::after(std::chrono::seconds(2)));
  std::filesystem::remove_all(directory);
  if (client) {
    std::fputs("connected although no manager runs\n", stderr);
    return EXIT_FAILURE;
  }
  std::printf("consumer: %s\n", client.error().to_string().c_str());
  return client.error().code == ErrorCode::kNoManager ? EXIT_SUCCESS : EXIT_FAILURE;
}
