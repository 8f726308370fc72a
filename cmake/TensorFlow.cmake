# Imported target `tensorflow_framework`: headers (as system headers), flags and library of the TensorFlow wheel
# that the package is being built for: the one of TFO_TENSORFLOW_PYTHON, an environment variable that names a Python, or
# of the Python that runs the build. Sets TFO_TF_VERSION, TFO_TF_CXX11_ABI, TFO_TF_CXX_STANDARD.
set(TFO_TENSORFLOW_PYTHON "$ENV{TFO_TENSORFLOW_PYTHON}")
if(TFO_TENSORFLOW_PYTHON STREQUAL "")
  set(TFO_TENSORFLOW_PYTHON "${Python_EXECUTABLE}")
endif()
execute_process(
  COMMAND "${TFO_TENSORFLOW_PYTHON}" "${PROJECT_SOURCE_DIR}/build_tools/find_tensorflow.py"
  OUTPUT_VARIABLE TFO_TF_JSON
  ERROR_VARIABLE TFO_TF_ERROR
  RESULT_VARIABLE TFO_TF_RESULT)
if(NOT TFO_TF_RESULT EQUAL 0)
  message(FATAL_ERROR "${TFO_TF_ERROR}")
endif()

string(JSON TFO_TF_VERSION GET "${TFO_TF_JSON}" version)
string(JSON TFO_TF_CXX11_ABI GET "${TFO_TF_JSON}" cxx11_abi)
string(JSON TFO_TF_CXX_STANDARD GET "${TFO_TF_JSON}" cxx_standard)
string(JSON TFO_TF_INCLUDE GET "${TFO_TF_JSON}" include)
string(JSON TFO_TF_LIBRARY GET "${TFO_TF_JSON}" library)
string(JSON TFO_TF_DEFINITIONS GET "${TFO_TF_JSON}" definitions)
message(STATUS "TensorFlow ${TFO_TF_VERSION}: ${TFO_TF_INCLUDE}")

add_library(tensorflow_framework SHARED IMPORTED)
set_target_properties(tensorflow_framework PROPERTIES
  IMPORTED_LOCATION "${TFO_TF_LIBRARY}"
  INTERFACE_INCLUDE_DIRECTORIES "${TFO_TF_INCLUDE}"
  INTERFACE_COMPILE_DEFINITIONS "${TFO_TF_DEFINITIONS}")
