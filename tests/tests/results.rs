//! What dispatches deliver and how long it stays, on both backends.

use deepep_core::bootstrap::Bootstrap;
use deepep_core::layout::ScaleOrder;
use deepep_core::tensor::DType;
use deepep_core::{DispatchArgs, Error};
use half::bf16;
use integration_tests::good::{Good, HIDDEN, TOKENS, buffer, builder};
use integration_tests::on_both_sides;
use integration_tests::ranks::{LONG, on_threads};
use integration_tests::tensors::read;

on_both_sides! {
    results_and_handles_that_are_held, |side| {
        on_threads(2, LONG, |bootstrap| {
            let mut buffer = builder(side).output_slots(2).handle_slots(3).build(bootstrap).unwrap();
            let good = Good::new(&buffer);
            let one = good.dispatch(&mut buffer).unwrap();
            let two = good.dispatch(&mut buffer).unwrap();
            let error = good.dispatch(&mut buffer).unwrap_err();
            assert!(matches!(error, Error::SlotsHeld { what: "dispatch result", slots: 2 }), "{error}");
            // What is held stays as it is; a handle alone doesn't hold the rows.
            let first = one.into_handle();
            let three = good.dispatch(&mut buffer).unwrap();
            three.event().wait(LONG).unwrap();
            assert_eq!(read::<bf16>(&buffer, two.x()), read::<bf16>(&buffer, three.x()));
            drop((two.into_handle(), three.into_handle()));
            let second = good.dispatch(&mut buffer).unwrap().into_handle();
            let third = good.dispatch(&mut buffer).unwrap().into_handle();
            let error = good.dispatch(&mut buffer).unwrap_err();
            assert!(matches!(error, Error::SlotsHeld { what: "dispatch handle", slots: 3 }), "{error}");
            drop(first);
            good.round(&mut buffer);
            drop((second, third));
            buffer.close().unwrap();
        });
    }
}

on_both_sides! {
    statistics_add_up, |side| {
        on_threads(2, LONG, |bootstrap| {
            let rank = bootstrap.rank();
            let mut buffer = buffer(side, bootstrap);
            let good = Good::new(&buffer);
            let mut counts = good.tensors.of(&buffer, &[100_i32, 200], 2, 1);
            for _ in 0..3 {
                let args =
                    DispatchArgs::new(good.x(), good.idx()).expanded(8).statistics(counts.view_mut());
                buffer.dispatch(args).unwrap().event().wait(LONG).unwrap();
            }
            // Experts 0 and 3 get all eight tokens, three times.
            let expected = if rank == 0 { [124, 200] } else { [100, 224] };
            assert_eq!(counts.read::<i32>(&buffer), expected);
            buffer.close().unwrap();
        });
    }
}

on_both_sides! {
    results_can_be_copied_out, |side| {
        on_threads(2, LONG, |bootstrap| {
            let mut buffer = buffer(side, bootstrap);
            let good = Good::new(&buffer);
            let scales: Vec<f32> = (0..TOKENS * 4).map(|i| i as f32).collect();
            let scales = good.tensors.of(&buffer, &scales, TOKENS, 4);
            let args = DispatchArgs::new(good.fp8(), good.idx())
                .scales(scales.view())
                .scale_order(ScaleOrder::ColumnMajor);
            let got = buffer.dispatch(args).unwrap();
            let rows = got.rows();
            let mut own = good.tensors.of(&buffer, &vec![0_u8; rows * HIDDEN], rows, HIDDEN);
            got.copy_out(got.x(), own.part_mut(DType::F8E4M3, rows, HIDDEN), None).unwrap();
            let mut small = good.tensors.of(&buffer, &[0_u8; HIDDEN], 1, HIDDEN);
            let out = small.part_mut(DType::F8E4M3, 1, HIDDEN);
            assert!(matches!(got.copy_out(got.x(), out, None), Err(Error::Shape { .. })));
            let out = small.part_mut(DType::F8E4M3, 1, HIDDEN);
            assert!(matches!(got.copy_out(good.fp8().first_rows(1), out, None), Err(Error::Tensor { .. })));
            // Columns with gaps between them on one side, and none on the other.
            let mut transposed = good.tensors.of(&buffer, &vec![0_f32; rows * 4], 4, rows);
            let view = transposed.view_mut();
            // SAFETY: the tensor's memory, seen as its transpose, and waited for below.
            let out = unsafe {
                let (address, space, strides) = (view.address(), view.space(), [1, rows as isize]);
                deepep_core::tensor::TensorMut::from_raw(address, space, DType::F32, [rows, 4], strides)
            }
            .unwrap();
            let copied = got.copy_out(got.scales().unwrap(), out, None).unwrap();
            drop(got);
            copied.wait(LONG).unwrap();
            assert!(own.read::<u8>(&buffer).iter().all(|&x| x == 1));
            let expected: Vec<f32> =
                (0..4).flat_map(|pack| (0..rows).map(move |row| (row % TOKENS * 4 + pack) as f32)).collect();
            assert_eq!(transposed.read::<f32>(&buffer), expected);
            buffer.close().unwrap();
        });
    }
}
