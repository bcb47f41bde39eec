//! Build script: the desktop feature will call `tauri_build` here.

fn main() {
    println!("cargo::rerun-if-changed=src-tauri/migrations");
}
