# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
include(GoogleTest)
find_package(GTest 1.12 CONFIG REQUIRED)

# What every test includes, compiled once: a third of each one's time. The preset dev goes without, so
# that files that forget an include are found.
option(KVFERRY_TEST_PCH "Precompile the headers that tests share" ON)
if(KVFERRY_TEST_PCH)
  file(WRITE "${PROJECT_BINARY_DIR}/test_pch.cpp" "")
  add_library(kvferry_test_pch OBJECT "${PROJECT_BINARY_DIR}/test_pch.cpp")
  target_link_libraries(kvferry_test_pch PRIVATE GTest::gmock fmt::fmt nlohmann_json::nlohmann_json kvferry_options)
  set_target_properties(kvferry_test_pch PROPERTIES CXX_EXTENSIONS OFF KVFERRY_OF_TESTS ON)
  target_precompile_headers(kvferry_test_pch PRIVATE
    <gmock/gmock.h> <gtest/gtest.h> <fmt/format.h> <nlohmann/json.hpp>
    <algorithm> <chrono> <condition_variable> <filesystem> <functional> <map> <memory> <mutex>
    <optional> <set> <string> <thread> <vector>)
  # What ccache needs to look into a precompiled header; its sloppiness is in scripts/common.sh.
  target_compile_options(kvferry_test_pch PRIVATE $<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess>)
endif()

# Labels of tests that are built; empty: all.
set(KVFERRY_TEST_LABELS "" CACHE STRING "Labels of the tests to build")

# What kvferry_add_test and kvferry_add_test_library have in common.
function(kvferry_compile_as_test target)
  target_link_libraries(${target} PRIVATE kvferry_options)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF KVFERRY_OF_TESTS ON)
  if(KVFERRY_TEST_PCH)
    target_precompile_headers(${target} REUSE_FROM kvferry_test_pch)
    target_link_libraries(${target} PRIVATE fmt::fmt)  # its definitions are in the headers' text
    target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess>)
  endif()
endfunction()

# kvferry_add_test_library(NAME kvferry_replay_fixture SOURCES ... LINK ...): a fixture that several tests share.
function(kvferry_add_test_library)
  cmake_parse_arguments(arg "" "NAME" "SOURCES;LINK" ${ARGN})
  add_library(${arg_NAME} STATIC ${arg_SOURCES})
  target_link_libraries(${arg_NAME} PUBLIC ${arg_LINK} GTest::gmock)
  kvferry_compile_as_test(${arg_NAME})
endfunction()

# kvferry_add_test(NAME ipc_size_test SOURCES ... LINK kvferry::ipc LABEL pure|unit|multiproc|gpu|cli [TIMEOUT s] [PREFIX p] [LOCK l])
# ALONE: sources, too; see kvferry_use_unity.
# PREFIX goes before the names of the cases: two binaries of one source need it, since CTest would take
# equal names for one test.
# LOCK: no two cases of it run at once (nor others of that lock): each may need what the machine has once.
# pure: one thread, no other process: nothing for the thread sanitizer.
# One label per binary: lists in gtest_discover_tests drop the properties after them on CMake 3.25.
# NO_PRETTY_VALUES: a parameter without a printer would put addresses into the names.
function(kvferry_add_test)
  cmake_parse_arguments(arg "" "NAME;LABEL;TIMEOUT;PREFIX;LOCK" "SOURCES;ALONE;LINK" ${ARGN})
  if(NOT arg_LABEL)
    message(FATAL_ERROR "test ${arg_NAME} has no LABEL")
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 60)
  endif()
  if(KVFERRY_SANITIZER)
    # The limit is for tests that hang; a sanitizer makes the others several times slower.
    math(EXPR arg_TIMEOUT "${arg_TIMEOUT} * 5")
  endif()
  add_executable(${arg_NAME} ${arg_SOURCES} ${arg_ALONE})
  target_link_libraries(${arg_NAME} PRIVATE ${arg_LINK} GTest::gmock GTest::gtest_main)
  kvferry_compile_as_test(${arg_NAME})
  if(KVFERRY_TEST_LABELS AND NOT arg_LABEL IN_LIST KVFERRY_TEST_LABELS)
    set_target_properties(${arg_NAME} PROPERTIES EXCLUDE_FROM_ALL ON)
    return()
  endif()
  list(LENGTH arg_SOURCES source_count)
  if(source_count GREATER 1)
    kvferry_use_unity(${arg_NAME} ${arg_ALONE})
  endif()
  if(arg_LABEL STREQUAL "gpu")
    set(arg_LOCK gpu0)
  endif()
  set(lock)
  if(arg_LOCK)
    set(lock RESOURCE_LOCK ${arg_LOCK})
  endif()
  gtest_discover_tests(${arg_NAME} TEST_PREFIX "${arg_PREFIX}" NO_PRETTY_VALUES DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT ${arg_TIMEOUT} LABELS ${arg_LABEL} ${lock})
endfunction()
