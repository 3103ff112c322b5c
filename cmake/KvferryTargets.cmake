# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# The one place where a kvferry target gets its language level, warnings and sanitizers.

add_library(kvferry_options INTERFACE)
target_compile_features(kvferry_options INTERFACE cxx_std_20)
target_compile_options(kvferry_options INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wconversion;-Wsign-conversion;-Wshadow;-Werror>"
  "$<$<COMPILE_LANGUAGE:CUDA>:--Werror=all-warnings;-Xcompiler=-Wall,-Wextra,-Wshadow,-Werror>")
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # gcc 12 reports overlapping copies inside std::string's assignment when it optimises (PR 105651).
  target_compile_options(kvferry_options INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>")
endif()
if(KVFERRY_SANITIZER)
  target_compile_options(kvferry_options INTERFACE
    "$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${KVFERRY_SANITIZER};-fno-omit-frame-pointer;-fno-sanitize-recover=all>")
  # Code of tests goes without the checks of undefined behaviour, which take half of the time that
  # compiling it does. The libraries and programs that it calls have them; of inline functions of
  # headers a test's program may have the copy without.
  target_compile_options(kvferry_options INTERFACE
    "$<$<BOOL:$<TARGET_PROPERTY:KVFERRY_OF_TESTS>>:-fno-sanitize=undefined>")
  target_link_options(kvferry_options INTERFACE "-fsanitize=${KVFERRY_SANITIZER}")
  # Programs with a sanitizer in them are large, and there are many: a third of the time.
  find_program(KVFERRY_LLD ld.lld)
  if(KVFERRY_LLD AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_link_options(kvferry_options INTERFACE -fuse-ld=lld)
  endif()
endif()

# Sources in batches take half the time to build. Off in the presets dev and cuda: there a file that
# forgets an include is found, and one that changed is compiled alone.
option(KVFERRY_UNITY "Compile sources in batches" OFF)
set(KVFERRY_UNITY_BATCH 6 CACHE STRING "Sources in a batch")
if(KVFERRY_UNITY AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # An eighth of gcc's time goes into collecting garbage, for a fifth less memory.
  target_compile_options(kvferry_options INTERFACE
    "$<$<COMPILE_LANGUAGE:CXX>:SHELL:--param ggc-min-heapsize=2097152>")
endif()

# kvferry_use_unity(TARGET files...): the files are compiled alone, since names of theirs are others', too, or
# since tests have objects in their place (tests/mutants).
function(kvferry_use_unity target)
  if(NOT KVFERRY_UNITY)
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${KVFERRY_UNITY_BATCH})
  set_source_files_properties(${ARGN} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  # In a batch gcc takes every class for one of a header.
  target_compile_options(${target} PRIVATE
    "$<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-Wno-subobject-linkage>")
endfunction()

# kvferry_add_library(NAME ipc SOURCES ... HEADERS ... PUBLIC targets... PRIVATE targets...)
# makes the static library kvferry_<name> with the alias kvferry::<name>. ALONE: see kvferry_use_unity.
function(kvferry_add_library)
  cmake_parse_arguments(arg "" "NAME" "SOURCES;ALONE;HEADERS;PUBLIC;PRIVATE" ${ARGN})
  set(target kvferry_${arg_NAME})
  add_library(${target} STATIC)
  add_library(kvferry::${arg_NAME} ALIAS ${target})
  target_sources(${target} PRIVATE ${arg_SOURCES} ${arg_ALONE})
  kvferry_use_unity(${target} ${arg_ALONE})
  target_sources(${target} PUBLIC FILE_SET HEADERS BASE_DIRS include FILES ${arg_HEADERS})
  target_include_directories(${target} PRIVATE src)
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_link_libraries(${target} PUBLIC ${arg_PUBLIC} PRIVATE ${arg_PRIVATE} $<BUILD_INTERFACE:kvferry_options>)
  set_target_properties(${target} PROPERTIES
    EXPORT_NAME ${arg_NAME}
    CXX_EXTENSIONS OFF
    CXX_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON
    POSITION_INDEPENDENT_CODE ON
    VERIFY_INTERFACE_HEADER_SETS ON)
  set_property(GLOBAL APPEND PROPERTY KVFERRY_LIBRARIES ${target})
endfunction()

# kvferry_add_executable(NAME kvferry SOURCES ... LINK ...)
function(kvferry_add_executable)
  cmake_parse_arguments(arg "" "NAME" "SOURCES;LINK" ${ARGN})
  add_executable(${arg_NAME} ${arg_SOURCES})
  target_link_libraries(${arg_NAME} PRIVATE ${arg_LINK} kvferry_options)
  set_target_properties(${arg_NAME} PROPERTIES CXX_EXTENSIONS OFF)
endfunction()
