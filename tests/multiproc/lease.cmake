# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
kvferry_add_test_library(NAME kvferry_lease_fixture SOURCES lease_fixture.cpp LINK kvferry_test_support)
target_include_directories(kvferry_lease_fixture PRIVATE ${PROJECT_SOURCE_DIR}/ipc/src)
kvferry_add_executable(NAME kvferry_lease_peer SOURCES lease_peer.cpp LINK kvferry_test_support)

kvferry_add_executable(NAME kvferry_hostile_peer SOURCES hostile_peer.cpp LINK kvferry_test_support)
target_include_directories(kvferry_hostile_peer PRIVATE ${PROJECT_SOURCE_DIR}/ipc/src)

# Helpers are looked for beside the test binary.
foreach(name lease_bounds lease_cycles lease_deaths lease_quarantine lease_hello lease_raw
        lease_prepare lease_source lease_hostile lease_moves)
  kvferry_add_test(NAME ${name}_test LABEL multiproc TIMEOUT 120 SOURCES ${name}_test.cpp
                   LINK kvferry_lease_fixture)
  target_include_directories(${name}_test PRIVATE ${PROJECT_SOURCE_DIR}/ipc/src)
  add_dependencies(${name}_test kvferry_lease_peer)
endforeach()
add_dependencies(lease_hostile_test kvferry_hostile_peer)
