# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# Installs the libraries with their headers, the command and the package that find_package(kvferry)
# reads.
include(CMakePackageConfigHelpers)

set(kvferry_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/kvferry")
get_property(kvferry_libraries GLOBAL PROPERTY KVFERRY_LIBRARIES)

install(TARGETS ${kvferry_libraries}
  EXPORT kvferryTargets
  ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}"
  FILE_SET HEADERS DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
if(TARGET kvferry)
  install(TARGETS kvferry RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
  # Links to the one program, which looks at what it was called.
  foreach(daemon manager mover worker)
    install(FILES "$<TARGET_FILE_DIR:kvferry>/kvferry-${daemon}"
      DESTINATION "${CMAKE_INSTALL_BINDIR}")
  endforeach()
endif()
install(EXPORT kvferryTargets NAMESPACE kvferry:: DESTINATION "${kvferry_package_dir}")

configure_package_config_file(
  "${CMAKE_CURRENT_LIST_DIR}/kvferryConfig.cmake.in" "${PROJECT_BINARY_DIR}/kvferryConfig.cmake"
  INSTALL_DESTINATION "${kvferry_package_dir}"
  NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(
  "${PROJECT_BINARY_DIR}/kvferryConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES
    "${PROJECT_BINARY_DIR}/kvferryConfig.cmake"
    "${PROJECT_BINARY_DIR}/kvferryConfigVersion.cmake"
    "${CMAKE_CURRENT_LIST_DIR}/KvferryMsgpack.cmake"
  DESTINATION "${kvferry_package_dir}")
install(FILES
    "${PROJECT_SOURCE_DIR}/LICENSE"
    "${PROJECT_SOURCE_DIR}/README.md"
    "${PROJECT_SOURCE_DIR}/CHANGELOG.md"
  DESTINATION "${CMAKE_INSTALL_DOCDIR}")
# The example engine with them: it builds against the package, as its users' engines do.
install(DIRECTORY "${PROJECT_SOURCE_DIR}/docs/" DESTINATION "${CMAKE_INSTALL_DOCDIR}/docs")
