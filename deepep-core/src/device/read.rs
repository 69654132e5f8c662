//! Elements of views, brought to the host.

use cuda_vmm::Device;

use super::{PATIENCE, copied};
use crate::backend::cuda::Stream;
use crate::error::Result;
use crate::ops::require_device;
use crate::tensor::{Extent, Space, TensorRef};

/// The bytes of a view's elements, row after row, wherever it lies. What writes the view must have run.
///
/// Only elements are read, nothing that lies between them. Elements that follow each other, in rows or in columns, are read together.
///
/// # Errors
/// [`OtherDevice`](crate::Error::OtherDevice) for memory of another device than this; [`Vmm`](crate::Error::Vmm) if the driver refuses, and
/// [`CopyUnfinished`](crate::Error::CopyUnfinished) if it takes more than a minute. Behind the last two copies may still be under way: like that of other work that a
/// view was given to, its memory stays until they have run.
#[doc(alias = "cuMemcpyDtoHAsync")]
pub fn read(device: &Device, view: TensorRef<'_>) -> Result<Vec<u8>> {
    read_into(device, view, Vec::new())
}

/// As [`read`], with a vector whose contents go and whose memory is used again: the pages of new memory take longer than a copy. After an error it is gone.
///
/// # Errors
/// As [`read`].
#[doc(alias = "cuMemcpyDtoHAsync")]
pub fn read_into(device: &Device, view: TensorRef<'_>, mut bytes: Vec<u8>) -> Result<Vec<u8>> {
    if view.bytes() == 0 {
        bytes.clear();
        return Ok(bytes);
    }
    require_device("view", &view, Some(device.ordinal()))?;
    let pieces = Pieces::of(&view);
    let bytes = match view.space() {
        Space::Device => download(device, &view, pieces, bytes)?,
        Space::Host => {
            bytes.clear();
            bytes.reserve_exact(view.bytes());
            for address in pieces.addresses(&view) {
                // SAFETY: the view promises that the CPU can read every element, for as long as the view is borrowed; a piece has nothing but
                // elements.
                bytes.extend_from_slice(unsafe {
                    std::slice::from_raw_parts(address as *const u8, pieces.length)
                });
            }
            bytes
        }
    };
    Ok(if pieces.columns { transposed(&bytes, view.shape(), view.dtype().size()) } else { bytes })
}

/// Elements of a view that follow each other in memory without gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pieces {
    /// Bytes of a piece.
    length: usize,
    /// Number of pieces in each dimension, and the bytes from one to the next.
    count: [usize; 2],
    step: [isize; 2],
    /// The pieces are columns, in order, and not rows or parts of them.
    columns: bool,
}

impl Pieces {
    fn of(view: &Extent) -> Self {
        let ([rows, columns], size) = (view.shape(), view.dtype().size());
        let step = view.strides().map(|stride| stride * size as isize);
        let whole =
            |length: usize, count: [usize; 2]| Self { length: length * size, count, step, columns: false };
        if view.is_contiguous() {
            whole(rows * columns, [1, 1])
        } else if columns == 1 || view.strides()[1] == 1 {
            whole(columns, [rows, 1])
        } else if rows > 1 && view.strides()[0] == 1 {
            Self { columns: true, ..whole(rows, [1, columns]) }
        } else {
            whole(1, [rows, columns])
        }
    }

    fn addresses(self, view: &Extent) -> impl Iterator<Item = u64> {
        let (start, [down, across]) = (view.address(), self.step);
        (0..self.count[0] as isize).flat_map(move |row| {
            (0..self.count[1] as isize)
                .map(move |column| start.wrapping_add_signed((row * down + column * across) as i64))
        })
    }
}

/// Rows of a matrix that came column by column.
fn transposed(bytes: &[u8], [rows, columns]: [usize; 2], size: usize) -> Vec<u8> {
    let places = (0..rows).flat_map(|row| (0..columns).map(move |column| (column * rows + row) * size));
    places.flat_map(|place| &bytes[place..place + size]).copied().collect()
}

fn download(device: &Device, view: &Extent, pieces: Pieces, mut bytes: Vec<u8>) -> Result<Vec<u8>> {
    let length = view.bytes();
    bytes.resize(length, 0);
    let context = device.primary_context()?;
    let stream = Stream::new(&context)?;
    let what = format!("reading {length} bytes of device memory");
    // What else they use is the view's memory, which its owner was told of.
    copied(
        &context,
        &stream,
        bytes,
        &what,
        PATIENCE,
        || (),
        |driver, bytes, stream| {
            pieces.addresses(view).zip(bytes.chunks_exact_mut(pieces.length)).try_for_each(|(from, to)| {
                // SAFETY: the view that the caller has promises that its elements' memory is there, and a piece has nothing but elements; `to` has
                // that length, and is kept until the copies have run, or for good.
                unsafe { driver.cuMemcpyDtoHAsync(to.as_mut_ptr().cast(), from, to.len(), stream) }
            })
        },
    )
}

#[cfg(test)]
mod tests {
    use super::super::tests::on_emulator;
    use super::super::{DeviceMemory, STEP};
    use super::*;
    use crate::error::Error;
    use crate::tensor::DType;
    use cuda_vmm::Cuda;
    use cuda_vmm_emu::{Config, Emulator};

    #[test]
    fn views_of_host_memory_are_read_too() {
        on_emulator(|device| {
            let data: Vec<i32> = (0..12).collect();
            let columns = TensorRef::strided(&data, 4, 3, [1, 4]).unwrap();
            let got = read(device, columns).unwrap();
            assert_eq!(got[4..8], 4_i32.to_ne_bytes());
            assert_eq!(read(device, TensorRef::matrix(&data, 3, 4).unwrap().first_rows(0)).unwrap(), []);
            // What a vector held goes.
            let again = read_into(device, columns, vec![9; 100]).unwrap();
            assert_eq!(again, got);
            let none = TensorRef::matrix(&data, 3, 4).unwrap().first_rows(0);
            assert_eq!(read_into(device, none, again).unwrap(), []);
        });
    }

    /// Between the elements there is no memory.
    #[test]
    fn nothing_between_elements_is_read() {
        on_emulator(|device| {
            let mut three = [0; 3].map(|_| DeviceMemory::new(device, STEP).unwrap());
            three.sort_by_key(DeviceMemory::address);
            let [low, between, high] = three;
            drop(between);
            low.write(0, &[1, 2, 3, 4]).unwrap();
            high.write(0, &[5, 6, 7, 8]).unwrap();
            let (address, far) = (low.address(), (high.address() - low.address()) as isize);
            let views = [
                (address, [2, 4], [far, 1], vec![1, 2, 3, 4, 5, 6, 7, 8]),
                (address, [4, 2], [1, far], vec![1, 5, 2, 6, 3, 7, 4, 8]),
                (address, [2, 2], [far, 2], vec![1, 3, 5, 7]),
                (address, [2, 1], [far, 9], vec![1, 5]),
                (high.address() + 3, [2, 2], [-far, -2], vec![8, 6, 4, 2]),
                // One row twice.
                (address, [2, 4], [0, 1], vec![1, 2, 3, 4, 1, 2, 3, 4]),
            ];
            for (address, shape, strides, expected) in views {
                // SAFETY: every element lies in one of the memories; no operation gets the view.
                let view = unsafe { TensorRef::from_raw(address, Space::Device, DType::U8, shape, strides) };
                let view = view.unwrap();
                assert_eq!(read(device, view).unwrap(), expected, "{shape:?} {strides:?}");
                for before in [Vec::new(), vec![9; 3], vec![9; 100]] {
                    assert_eq!(read_into(device, view, before).unwrap(), expected, "{shape:?} {strides:?}");
                }
            }
            // SAFETY: no operation gets the view, and only the emulator looks at it.
            let hole =
                unsafe { TensorRef::from_raw(address, Space::Device, DType::U8, [2, 2], [far / 2, 1]) };
            assert!(matches!(read(device, hole.unwrap()), Err(Error::Vmm(_))));
        });
    }

    #[test]
    fn pieces_are_as_long_as_they_can_be() {
        let data = [0_i32; 64];
        let pieces = |rows, columns, strides| {
            let pieces = Pieces::of(&TensorRef::strided(&data, rows, columns, strides).unwrap());
            (pieces.length, pieces.count, pieces.columns)
        };
        assert_eq!(pieces(8, 8, [8, 1]), (256, [1, 1], false));
        assert_eq!(pieces(4, 4, [8, 1]), (16, [4, 1], false));
        assert_eq!(pieces(4, 8, [1, 8]), (16, [1, 8], true));
        assert_eq!(pieces(4, 1, [8, 3]), (4, [4, 1], false));
        assert_eq!(pieces(1, 4, [1, 2]), (4, [1, 4], false));
        assert_eq!(pieces(4, 2, [8, 2]), (4, [4, 2], false));
    }

    #[test]
    fn another_device_does_not_read() {
        let emulator = Emulator::new(Config::h200x2()).unwrap();
        {
            let cuda = Cuda::with_driver(emulator.driver()).unwrap();
            let memory = DeviceMemory::new(&cuda.device(1).unwrap(), 64).unwrap();
            // SAFETY: no operation gets the view.
            let view = unsafe { memory.view(0, DType::U8, [1, 64]).unwrap() };
            let refused = read(&cuda.device(0).unwrap(), view).unwrap_err();
            assert!(matches!(refused, Error::OtherDevice { got: 1, expected: 0, .. }), "{refused}");
            assert_eq!(read(&cuda.device(1).unwrap(), view).unwrap().len(), 64);
        }
        emulator.assert_empty();
    }
}
