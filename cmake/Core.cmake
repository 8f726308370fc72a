# The TensorFlow-free core as object libraries; TFO_CORE lists them.
#
# cc/core/*_isa.cc is compiled once per instruction set (namespace tfo::TFO_ISA), every other cc/core/*.cc once.
# The flags of an instruction set must never reach a file that includes TensorFlow, Eigen or STL containers: the linker
# keeps one copy of an inline function, and on an older processor an AVX-512 copy is an illegal instruction.
set(TFO_CORE_OPTIONS -O3 -ffp-contract=fast -fno-math-errno -fno-trapping-math)
set(TFO_ISA_OPTIONS_portable "")
set(TFO_ISA_OPTIONS_avx2 -mavx2 -mfma -mf16c -mprfchw)
set(TFO_ISA_OPTIONS_avx512
    -mavx512f -mavx512vl -mavx512bw -mavx512dq -mavx2 -mfma -mf16c -mprfchw -mprefer-vector-width=512)
set(TFO_ISA_OPTIONS_avx512_bf16 ${TFO_ISA_OPTIONS_avx512} -mavx512bf16 -mavx512vnni)
set(TFO_ISA_OPTIONS_avx512_vnni ${TFO_ISA_OPTIONS_avx512} -mavx512vnni)
set(TFO_ISA_OPTIONS_amx ${TFO_ISA_OPTIONS_avx512_bf16} -mamx-tile -mamx-bf16)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(TFO_ISAS portable avx2 avx512 avx512_bf16 amx)
  # Not a set of its own: what of avx512 there is a better form of where the processor multiplies integers of 8 bits.
  set(TFO_PARTIAL_ISAS avx512_vnni)
else()
  set(TFO_ISAS portable)
endif()

function(tfo_add_core)
  file(GLOB core_sources CONFIGURE_DEPENDS cc/core/*.cc)
  set(isa_sources ${core_sources})
  list(FILTER isa_sources INCLUDE REGEX "_isa\\.cc$")
  list(FILTER core_sources EXCLUDE REGEX "_isa\\.cc$")

  add_library(tfo_core OBJECT ${core_sources})
  target_include_directories(tfo_core PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_options(tfo_core PRIVATE ${TFO_CORE_OPTIONS})
  set(TFO_CORE tfo_core)
  foreach(isa IN LISTS TFO_ISAS TFO_PARTIAL_ISAS)
    set(sources ${isa_sources})
    if(isa IN_LIST TFO_PARTIAL_ISAS)
      list(FILTER sources INCLUDE REGEX "/quantized_[^/]*_isa\\.cc$")
    endif()
    add_library(tfo_core_${isa} OBJECT ${sources})
    target_include_directories(tfo_core_${isa} PRIVATE ${PROJECT_SOURCE_DIR})
    target_compile_definitions(tfo_core_${isa} PRIVATE TFO_ISA=${isa})
    target_compile_options(tfo_core_${isa} PRIVATE
      ${TFO_CORE_OPTIONS} -fno-exceptions -fno-rtti ${TFO_ISA_OPTIONS_${isa}})
    list(APPEND TFO_CORE tfo_core_${isa})
  endforeach()
  set(TFO_CORE ${TFO_CORE} PARENT_SCOPE)
endfunction()
