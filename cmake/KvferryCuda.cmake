# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# Decides whether the CUDA backend is built: sets KVFERRY_HAVE_CUDA and enables the CUDA language.
set(KVFERRY_HAVE_CUDA OFF)
if(NOT KVFERRY_CUDA STREQUAL "OFF")
  # nvcc is looked for where the toolkit's own installer puts it, too: it is often not on PATH.
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    find_program(KVFERRY_NVCC nvcc HINTS /usr/local/cuda/bin)
    mark_as_advanced(KVFERRY_NVCC)
    if(KVFERRY_NVCC)
      set(CMAKE_CUDA_COMPILER "${KVFERRY_NVCC}")
    endif()
  endif()
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80 90)
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    find_package(CUDAToolkit 12.8)
    if(CUDAToolkit_FOUND)
      set(KVFERRY_HAVE_CUDA ON)
      # CMake 3.25 does not know that nvcc 13 accepts C++20.
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
  endif()
  if(KVFERRY_CUDA STREQUAL "ON" AND NOT KVFERRY_HAVE_CUDA)
    message(FATAL_ERROR "KVFERRY_CUDA=ON, but no CUDA toolkit >= 12.8 was found; install one, "
                        "set CMAKE_CUDA_COMPILER, or configure with -DKVFERRY_CUDA=AUTO")
  endif()
endif()
message(STATUS "kvferry: CUDA backend ${KVFERRY_HAVE_CUDA}")
