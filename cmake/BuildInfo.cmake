# What the op library was built for: compiled into _ops.so (tfo_build_info) and written beside it as
# _build_info.json, which the loader reads first because a library of the wrong C++ ABI cannot even be opened.
configure_file("${PROJECT_SOURCE_DIR}/cmake/build_info.json.in"
               "${PROJECT_BINARY_DIR}/_build_info.json" @ONLY)
file(READ "${PROJECT_BINARY_DIR}/_build_info.json" TFO_BUILD_INFO)
set(TFO_BUILD_INFO_SOURCE "${PROJECT_BINARY_DIR}/build_info.cc")
configure_file("${PROJECT_SOURCE_DIR}/cmake/build_info.cc.in" "${TFO_BUILD_INFO_SOURCE}" @ONLY)

function(tfo_write_build_info target)
  add_custom_command(TARGET ${target} POST_BUILD
    COMMAND ${CMAKE_COMMAND} -E copy "${PROJECT_BINARY_DIR}/_build_info.json"
            "${TFO_OUTPUT_DIR}/_build_info.json"
    VERBATIM)
endfunction()
