# Sources of the CPU kernels.  What ends in _avx2.cc or _avx512.cc is compiled for
# that instruction set; dispatch.cc picks one at run time.
file(GLOB CPU_SOURCES CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/cpu/*.cc)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  foreach(source ${CPU_SOURCES})
    if(source MATCHES "_avx2.cc$")
      set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "-mavx2;-mfma")
    elseif(source MATCHES "_avx512.cc$")
      set_source_files_properties(${source} PROPERTIES
        COMPILE_OPTIONS "-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mfma")
    elseif(source MATCHES "_baseline.cc$")
      # Its multiplications and additions stay apart, whatever -march says.
      set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "-ffp-contract=off")
    endif()
  endforeach()
endif()
