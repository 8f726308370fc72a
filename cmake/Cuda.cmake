# The GPU half: kernels and launchers as one object library, and the two shared objects made of it:
#   _cuda_ops.so  TensorFlow kernels for the GPU (cuda/tf), of the ops that _ops.so registers
#   _cuda.*.so    the launchers on device arrays, without TensorFlow (cuda/python)
# TFO_CUDA is AUTO (built where a CUDA compiler is found), ON or OFF; the environment variable is its default.
# TFO_CUDA_ARCHS lists what the binary is to hold: NN-real machine code, NN-virtual PTX, NN both.
set(TFO_CUDA_DEFAULT AUTO)
if(DEFINED ENV{TFO_CUDA} AND NOT "$ENV{TFO_CUDA}" STREQUAL "")
  set(TFO_CUDA_DEFAULT "$ENV{TFO_CUDA}")
endif()
set(TFO_CUDA "${TFO_CUDA_DEFAULT}" CACHE STRING "Build the GPU half: AUTO, ON or OFF")
set_property(CACHE TFO_CUDA PROPERTY STRINGS AUTO ON OFF)
string(TOUPPER "${TFO_CUDA}" TFO_CUDA_CHOICE)
if(NOT TFO_CUDA_CHOICE MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "TFO_CUDA must be AUTO, ON or OFF, not ${TFO_CUDA}")
endif()

# Machine code for every architecture from 80 on that the compiler knows among these, and PTX of the newest, which
# drivers translate for later cards.
function(tfo_default_cuda_archs out)
  set(archs 80 86 89 90)
  if(CMAKE_CUDA_COMPILER_ID STREQUAL "NVIDIA" AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
    list(APPEND archs 100)
  endif()
  list(POP_BACK archs newest)
  list(TRANSFORM archs APPEND "-real")
  set(${out} ${archs} ${newest} PARENT_SCOPE)
endfunction()

set(TFO_HAS_CUDA OFF)
set(TFO_CUDA_COMPILER "none")
set(TFO_BUILT_CUDA_ARCHS "none")
if(NOT TFO_CUDA_CHOICE STREQUAL "OFF")
  include(CheckLanguage)
  # A list of the project's own is made once the compiler is known; until then CMake is to take none of its own.
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80-real)
  endif()
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    set(TFO_HAS_CUDA ON)
    set(TFO_CUDA_COMPILER "${CMAKE_CUDA_COMPILER_ID} ${CMAKE_CUDA_COMPILER_VERSION}")
    tfo_default_cuda_archs(TFO_DEFAULT_CUDA_ARCHS)
    set(TFO_CUDA_ARCHS "${TFO_DEFAULT_CUDA_ARCHS}" CACHE STRING
        "CUDA architectures, as CMAKE_CUDA_ARCHITECTURES takes them")
    set(TFO_BUILT_CUDA_ARCHS "${TFO_CUDA_ARCHS}")
    message(STATUS "CUDA: ${TFO_CUDA_COMPILER}, architectures ${TFO_CUDA_ARCHS}")
  elseif(TFO_CUDA_CHOICE STREQUAL "ON")
    message(FATAL_ERROR
      "TFO_CUDA=ON needs a CUDA compiler and none was found. Install the CUDA toolkit 12 or 13 "
      "(https://developer.nvidia.com/cuda-downloads) and put its bin folder on PATH, or name the compiler in "
      "CUDACXX; TFO_CUDA=OFF builds without the GPU half.")
  else()
    message(STATUS "No CUDA compiler found: building without the GPU half (TFO_CUDA=ON says what is missing)")
  endif()
endif()

function(tfo_add_cuda)
  file(GLOB kernel_sources CONFIGURE_DEPENDS cuda/*.cu cuda/*.cc)
  add_library(tfo_cuda OBJECT ${kernel_sources})
  target_include_directories(tfo_cuda PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(tfo_cuda PRIVATE CUDA::toolkit)
  set_target_properties(tfo_cuda PROPERTIES
    CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON CXX_STANDARD 17
    CUDA_ARCHITECTURES "${TFO_CUDA_ARCHS}"
    CUDA_RUNTIME_LIBRARY Static
    CUDA_VISIBILITY_PRESET hidden)

  file(GLOB op_sources CONFIGURE_DEPENDS cuda/tf/*.cc)
  add_library(_cuda_ops MODULE ${op_sources} ${TFO_BUILD_INFO_SOURCE})
  set_target_properties(_cuda_ops PROPERTIES PREFIX "" SUFFIX ".so")
  file(GLOB python_sources CONFIGURE_DEPENDS cuda/python/*.cc)
  pybind11_add_module(_cuda MODULE NO_EXTRAS ${python_sources})
  foreach(target _cuda_ops _cuda)
    set_target_properties(${target} PROPERTIES
      LINKER_LANGUAGE CXX CUDA_RUNTIME_LIBRARY None LIBRARY_OUTPUT_DIRECTORY "${TFO_OUTPUT_DIR}")
    target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
    # The static runtime comes before TensorFlow: the GPU wheel's framework exports cuda* stubs of another version,
    # to which the linker and the loader would bind. For the same reason none of ours is exported.
    target_link_libraries(${target} PRIVATE tfo_cuda CUDA::cudart_static)
    target_link_options(${target} PRIVATE -Wl,--exclude-libs,ALL)
  endforeach()
  target_link_libraries(_cuda_ops PRIVATE tensorflow_framework)
  target_link_options(_cuda_ops PRIVATE -Wl,-z,defs)
endfunction()
