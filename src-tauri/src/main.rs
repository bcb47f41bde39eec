//! The `traygate` program.

// A call is some dozens of small blocks, often freed on another thread than they were taken on:
// the system's allocator takes a tenth of its time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    traygate::cli::main()
}
