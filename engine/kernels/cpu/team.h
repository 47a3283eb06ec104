// A team of threads that goes from phase to phase of one pass. OpenMP's barriers wait for every thread to arrive; on a machine
// that does something else as well (the gateway, a client, a neighbour), a thread that the scheduler has put aside then stops all
// the others for a time slice, hundreds of times a pass. Here a phase is over when its chunks are done: who is late finds that
// the others have gone on, and joins them. Only a chunk that is being worked on is waited for.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "tiles.h"

namespace turnkeep {

// A hint to the processor that this is a waiting loop.
static inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

class Team {
  public:
    explicit Team(int threads) {
        for (int i = 1; i < threads; i++) helpers_.emplace_back([this] { help(); });
    }

    ~Team() {
        std::lock_guard<std::mutex> nobody_computes(pass_);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
        }
        wake_.notify_all();
        for (auto& helper : helpers_) helper.join();
    }

    int size() const { return int(helpers_.size()) + 1; }

    // Memory for what threads share during a pass, 64 bytes aligned; it stays from one pass to the next. Only within a Pass.
    char* memory(int64_t bytes) {
        if (memory_size_ < bytes) {
            memory_.reset();
            memory_.reset(new char[bytes + 64]);
            memory_size_ = bytes;
        }
        return memory_.get() + (64 - reinterpret_cast<uintptr_t>(memory_.get()) % 64) % 64;
    }

    // A pass keeps the helpers awake from its first phase to its last. One thread at a time may have one.
    class Pass {
      public:
        explicit Pass(Team& team) : lock_(team.pass_), team_(team) {
            tile_shape().forget();  // other libraries configure this thread's tiles too
            {
                std::lock_guard<std::mutex> lock(team_.mutex_);
                team_.awake_ = true;
            }
            team_.wake_.notify_all();
        }
        ~Pass() {
            {
                std::lock_guard<std::mutex> lock(team_.mutex_);
                team_.awake_ = false;
            }
            tile_shape().release();
        }

      private:
        std::lock_guard<std::mutex> lock_;
        Team& team_;
    };

    // Calls work(i) for every i below `chunks`, on any threads, and returns when all are done. Only within a Pass.
    template <class Work>
    void run(int64_t chunks, const Work& work) {
        if (helpers_.empty() || chunks <= 1) {
            for (int64_t i = 0; i < chunks; i++) work(i);
            return;
        }
        // More chunks than a ticket can count are handed out in runs.
        const int64_t run = (chunks + kMaxChunks - 1) / kMaxChunks;
        const int64_t total = (chunks + run - 1) / run;
        struct Runs {
            const Work& work;
            int64_t chunks, run;
        } runs{work, chunks, run};
        context_ = &runs;
        call_ = [](void* context, int64_t i) {
            const Runs& r = *static_cast<Runs*>(context);
            const int64_t end = (i + 1) * r.run < r.chunks ? (i + 1) * r.run : r.chunks;
            for (int64_t c = i * r.run; c < end; c++) r.work(c);
        };
        done_.store(0, std::memory_order_relaxed);
        phase_++;
        ticket_.store(ticket(phase_, total, 0), std::memory_order_release);
        while (take()) {
        }
        for (int spins = 0; done_.load(std::memory_order_acquire) != total; spins++) {
            if (spins < kSpins)
                relax();
            else
                std::this_thread::yield();
        }
    }

  private:
    static constexpr int64_t kMaxChunks = (1 << 20) - 1;
    static constexpr int kSpins = 2000;

    // phase (24 bits), how many chunks it has, which is next: claiming one is a compare-and-swap on all three, so that a claim
    // made for a phase that is over must fail. What a phase's work is may be read after a claim only: from then on the phase
    // cannot end.
    static uint64_t ticket(uint64_t phase, uint64_t total, uint64_t next) { return phase << 40 | total << 20 | next; }

    bool take() {
        uint64_t t = ticket_.load(std::memory_order_acquire);
        while (true) {
            const uint64_t next = t & kMaxChunks, total = t >> 20 & kMaxChunks;
            if (next >= total) return false;
            if (ticket_.compare_exchange_weak(t, t + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
                call_(context_, int64_t(next));
                done_.fetch_add(1, std::memory_order_acq_rel);
                return true;
            }
        }
    }

    void help() {
        while (true) {
            {
                std::unique_lock<std::mutex> lock(mutex_);
                if (!awake_ && !stop_) {
                    tile_shape().release();  // a sleeper's tile registers need not be saved
                    wake_.wait(lock, [this] { return awake_ || stop_; });
                }
                if (stop_) return;
            }
            for (int spins = 0; awake_.load(std::memory_order_relaxed); spins++) {
                if (take())
                    spins = 0;
                else if (spins < kSpins)
                    relax();
                else
                    std::this_thread::yield();
            }
        }
    }

    std::mutex pass_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<bool> awake_{false};
    bool stop_ = false;
    std::atomic<uint64_t> ticket_{0};
    std::atomic<int64_t> done_{0};
    uint64_t phase_ = 0;
    void (*call_)(void*, int64_t) = nullptr;
    void* context_ = nullptr;
    std::unique_ptr<char[]> memory_;
    int64_t memory_size_ = 0;
    std::vector<std::thread> helpers_;
};

// One thread by itself, with the interface of a Team.
struct Alone {
    int size() const { return 1; }
    template <class Work>
    void run(int64_t chunks, const Work& work) const {
        for (int64_t i = 0; i < chunks; i++) work(i);
    }
};

}  // namespace turnkeep
