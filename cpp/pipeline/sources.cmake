target_sources(offload_core PRIVATE
  cpp/pipeline/batch.cpp
  cpp/pipeline/job.cpp
  cpp/pipeline/pipeline.cpp)
