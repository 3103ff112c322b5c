# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# msgpack's C++ library calls its target msgpackc-cxx up to 4.x and msgpack-cxx from 5.0 on, and
# its package msgpack or msgpack-cxx. Afterwards there is msgpackc-cxx, here and at our consumers.
find_package(msgpack CONFIG REQUIRED NAMES msgpack-cxx msgpackc-cxx msgpack)
if(NOT TARGET msgpackc-cxx)
  add_library(msgpackc-cxx INTERFACE IMPORTED)
  target_link_libraries(msgpackc-cxx INTERFACE msgpack-cxx)
endif()
