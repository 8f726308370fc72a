# pybind11 as installed beside the Python interpreter.
execute_process(
  COMMAND ${Python_EXECUTABLE} -m pybind11 --cmakedir
  OUTPUT_VARIABLE TFO_PYBIND11_DIR
  ERROR_VARIABLE TFO_PYBIND11_ERROR
  OUTPUT_STRIP_TRAILING_WHITESPACE
  RESULT_VARIABLE TFO_PYBIND11_RESULT)
if(NOT TFO_PYBIND11_RESULT EQUAL 0)
  message(FATAL_ERROR "pybind11 is missing: run ${Python_EXECUTABLE} -m pip install pybind11")
endif()
set(PYBIND11_FINDPYTHON ON)
find_package(pybind11 CONFIG REQUIRED PATHS "${TFO_PYBIND11_DIR}" NO_DEFAULT_PATH)
