//! The stack of contexts belongs to a thread, and so does the guard.

use cuda_vmm::Context;

fn send(context: &'static Context) {
    let bound = context.bind().unwrap();
    std::thread::spawn(move || drop(bound));
}

fn main() {}
