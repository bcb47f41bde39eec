//! The `traygate` program.

fn main() -> std::process::ExitCode {
    traygate::cli::main()
}
