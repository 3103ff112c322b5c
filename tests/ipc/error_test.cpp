// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/error.hpp"

#include "kvferry/ipc/base/unique_fd.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>

namespace kvferry::ipc {
namespace {

TEST(ErrorTest, AFullFileSystemIsNoLackOfHostMemory) {
  const UniqueFd full(::open("/dev/full", O_WRONLY | O_CLOEXEC));
  ASSERT_EQ(::write(full.get(), "text", 4), -1);
  const Error error = KVFERRY_ERRNO("writing {}", "/dev/full");
  EXPECT_EQ(error.to_string(), "system: writing /dev/full: No space left on device");
  EXPECT_EQ(error.native_code, ENOSPC);
}

TEST(ErrorTest, WhatTheKernelSaysHasACodeOfItsOwnWhereItIsTreatedInOneWay) {
  const auto code_of = [](int value) {
    errno = value;
    return KVFERRY_ERRNO("asking").code;
  };
  EXPECT_EQ(code_of(ENOMEM), ErrorCode::kNoHostMemory);
  EXPECT_EQ(code_of(ENOENT), ErrorCode::kNotFound);
  for (const int refused : {EACCES, EPERM, EROFS}) {
    EXPECT_EQ(code_of(refused), ErrorCode::kPermission);
  }
  EXPECT_EQ(code_of(EIO), ErrorCode::kSystem);
}

}  // namespace
}  // namespace kvferry::ipc
