// Events of the copier: kept for further use once nobody asks for them.
#include "gpu.h"
#include "gpu_copier.h"

namespace kvoffload {

std::uintptr_t GpuCopier::take_event() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::uintptr_t event = 0;
    if (!spare_events_.empty()) {
        event = spare_events_.back();
        spare_events_.pop_back();
    } else if (gpu::event_create(&event) == gpu::kOkay) {
        all_events_.push_back(event);
    } else {
        event = 0;
    }
    return event;
}

void GpuCopier::give_events(std::vector<std::uintptr_t>* events) {
    for (const std::uintptr_t event : *events) {
        if (event != 0) spare_events_.push_back(event);
    }
    events->clear();
}

// Later work of the one stream waits for all earlier work of the other.
int GpuCopier::order_after(std::uintptr_t later, std::uintptr_t earlier) {
    std::vector<std::uintptr_t> event{take_event()};
    int code = gpu::event_record(event[0], earlier);
    if (code == gpu::kOkay) code = gpu::stream_wait(later, event[0]);
    const std::lock_guard<std::mutex> lock(mutex_);
    give_events(&event);  // a wait keeps what it waits for; the event may be recorded anew
    return code;
}

}  // namespace kvoffload
