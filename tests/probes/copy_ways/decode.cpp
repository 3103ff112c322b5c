// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "probes/copy_ways/decode.hpp"

#include "probes/copy_ways/kernels.hpp"

#include <pthread.h>

#include <ctime>
#include <utility>

namespace kvferry::probes {
namespace {

constexpr std::size_t kWeightsBytes = std::size_t{4} << 30;
constexpr std::size_t kKernels = 128;

}  // namespace

Decode::Decode()
    : weights_(allocate_device(kWeightsBytes)), sink_(allocate_device(sizeof(unsigned))) {
  KVFERRY_PROBE_CUDA(cudaMemset(weights_.data(), 0, kWeightsBytes));
  KVFERRY_PROBE_CUDA(cudaDeviceSynchronize());
  record_graph();
  thread_ = std::jthread([this](const std::stop_token& stop) { generate(stop); });
}

Decode::~Decode() { pause(); }

void Decode::record_graph() {
  unsigned thread_blocks = 0;
  KVFERRY_PROBE_CUDA(count_filling_thread_blocks(&thread_blocks));
  constexpr std::size_t kSliceBytes = kWeightsBytes / kKernels;
  KVFERRY_PROBE_CUDA(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeThreadLocal));
  for (std::size_t i = 0; i < kKernels; ++i) {
    KVFERRY_PROBE_CUDA(launch_stream_weights(weights_.data() + i * kSliceBytes, kSliceBytes,
                                             reinterpret_cast<unsigned*>(sink_.data()),
                                             thread_blocks, stream_.get()));
  }
  cudaGraph_t captured = nullptr;
  KVFERRY_PROBE_CUDA(cudaStreamEndCapture(stream_.get(), &captured));
  graph_ = instantiate(Graph(captured));
}

void Decode::resume() {
  const std::scoped_lock lock(mutex_);
  rethrow_failure();
  wanted_ = true;
  changed_.notify_all();
}

void Decode::pause() {
  std::unique_lock lock(mutex_);
  wanted_ = false;
  // wait-brief: the token under way; it waits for the device only
  changed_.wait(lock, [this] { return !token_under_way_; });
}

void Decode::begin_sample() {
  const std::scoped_lock lock(mutex_);
  sample_us_.clear();
  sampling_ = true;
}

std::vector<double> Decode::end_sample() {
  const std::scoped_lock lock(mutex_);
  sampling_ = false;
  rethrow_failure();
  return std::exchange(sample_us_, {});
}

void Decode::rethrow_failure() const {
  if (failure_) {
    std::rethrow_exception(failure_);
  }
}

std::chrono::nanoseconds Decode::processor_time() const {
  // Its thread lives as long as this object, so its clock does.
  clockid_t clock = CLOCK_THREAD_CPUTIME_ID;
  timespec time{};
  pthread_getcpuclockid(const_cast<std::jthread&>(thread_).native_handle(), &clock);
  clock_gettime(clock, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

void Decode::generate(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  try {
    // wait-idle: a decode that is wanted; resume() or the end; thread decode
    while (changed_.wait(lock, stop, [this] { return wanted_; })) {
      const bool sampled = sampling_;
      token_under_way_ = true;
      lock.unlock();
      const double us = run_token();
      lock.lock();
      token_under_way_ = false;
      if (sampled && sampling_) {
        sample_us_.push_back(us);
      }
      changed_.notify_all();
    }
  } catch (...) {
    if (!lock.owns_lock()) {
      lock.lock();
    }
    failure_ = std::current_exception();
    wanted_ = false;
    token_under_way_ = false;
    changed_.notify_all();
  }
}

double Decode::run_token() {
  const auto start = std::chrono::steady_clock::now();
  KVFERRY_PROBE_CUDA(cudaGraphLaunch(graph_.get(), stream_.get()));
  KVFERRY_PROBE_CUDA(cudaEventRecord(token_over_.get(), stream_.get()));
  // By looking again and again: to be woken up would take a part of the loss that is measured.
  cudaError_t code = cudaErrorNotReady;
  while (code == cudaErrorNotReady) {
    code = cudaEventQuery(token_over_.get());
  }
  KVFERRY_PROBE_CUDA(code);
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
      .count();
}

}  // namespace kvferry::probes
