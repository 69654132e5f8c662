//! A binding cannot be undone while the address is in use.

use cuda_vmm::multicast::Multicast;

fn behind_its_back(multicast: &Multicast) {
    for binding in multicast.bindings() {
        let _ = binding.unbind();
    }
}

fn main() {}
