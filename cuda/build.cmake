# Builds the module _cuda with the nvcc in CMAKE_CUDA_COMPILER.
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
# sm_80 code also runs on 8.6 and 8.9; the PTX serves GPUs newer than 9.0.
set(CMAKE_CUDA_ARCHITECTURES "80-real;90")
# Linked into the module, so that importing it needs no toolkit and no driver.
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)

# NVIDIA's wheels keep the libraries in lib, where nvcc and CMake look in lib64.
get_filename_component(CUDA_ROOT "${CMAKE_CUDA_COMPILER}" REALPATH)
get_filename_component(CUDA_ROOT "${CUDA_ROOT}/../.." ABSOLUTE)
if(EXISTS "${CUDA_ROOT}/lib/libcudart_static.a")
  set(CMAKE_CUDA_FLAGS "-L${CUDA_ROOT}/lib ${CMAKE_CUDA_FLAGS}")
  link_directories("${CUDA_ROOT}/lib")
endif()

# Keeps ptxas's report on every kernel beside the build: the tests read it.
set(CMAKE_CUDA_COMPILER_LAUNCHER ${Python_EXECUTABLE} ${CMAKE_SOURCE_DIR}/cuda/keep_report.py
                                 ${CMAKE_BINARY_DIR}/ptxas)
enable_language(CUDA)

option(JFT_BOUNDED_WAITS "Trap in waits that never end: for development" OFF)

file(GLOB CUDA_SOURCES CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/cuda/*.cu)
# Hopper's own instructions need a target of their own.
set(HOPPER_SOURCES ${CMAKE_SOURCE_DIR}/cuda/hopper.cu ${CMAKE_SOURCE_DIR}/cuda/hopper_few.cu)
list(REMOVE_ITEM CUDA_SOURCES ${HOPPER_SOURCES})
add_library(cuda_hopper OBJECT ${HOPPER_SOURCES})
set_target_properties(cuda_hopper PROPERTIES CUDA_ARCHITECTURES 90a-real)
target_include_directories(cuda_hopper PRIVATE ${CMAKE_SOURCE_DIR})

add_extension(_cuda ffi/module_cuda.cc ffi/handlers_cuda.cc ${CUDA_SOURCES}
              $<TARGET_OBJECTS:cuda_hopper>)
foreach(target _cuda cuda_hopper)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v>)
  if(JFT_BOUNDED_WAITS)
    target_compile_definitions(${target} PRIVATE JFT_BOUNDED_WAITS)
  endif()
endforeach()
target_include_directories(_cuda SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
list(JOIN CMAKE_CUDA_ARCHITECTURES "," ARCHITECTURES)
target_compile_definitions(_cuda PRIVATE JFT_CUDA_ARCHITECTURES="${ARCHITECTURES},90a-real")
