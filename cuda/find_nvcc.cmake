# Sets CMAKE_CUDA_COMPILER to the nvcc to use, or leaves it unset.
# In this order: CUDACXX, PATH, /usr/local/cuda, NVIDIA's wheels in site-packages.
if(DEFINED ENV{CUDACXX})
  set(CMAKE_CUDA_COMPILER "$ENV{CUDACXX}")
else()
  find_program(NVCC nvcc PATHS /usr/local/cuda/bin ${Python_SITELIB}/nvidia/cu13/bin)
  if(NVCC)
    set(CMAKE_CUDA_COMPILER "${NVCC}")
  endif()
endif()
