module {
  func.func @main(%0: tensor<1x1xi32>, %1: tensor<1x1xi32>, %2: tensor<1x2xi32>, %3: tensor<1xi32>, %4: tensor<1xi32>, %5: tensor<6x2x2x2xf32> {tf.aliasing_output = 1 : i32}, %6: tensor<6x2x2x2xf32> {tf.aliasing_output = 2 : i32}) -> (tensor<1x1x11xf32>, tensor<6x2x2x2xf32>, tensor<6x2x2x2xf32>) {
    %7 = stablehlo.constant dense<[[-0.2635445, -0.13072938, 0.004242003, 0.20488322, -0.4494564, -0.13048166, 0.27476293, 0.056188524], [-0.4835068, 0.13924599, -0.24954891, -0.077622235, 0.090690196, 0.3369336, -0.2649241, 0.48084593], [0.36088705, -0.17312455, 0.1826027, 0.031459093, -0.28405803, -0.3954658, -0.42945492, -0.18111932], [-0.37018496, 0.20724636, 0.08288705, -0.120687604, -0.23705202, 0.25090468, 0.4307009, -0.32272595], [-0.16584897, 0.4832415, -0.11141509, 0.048047125, -0.033876777, 0.4943393, 0.3750469, 0.21140814], [0.4577301, 0.47499222, -0.34504223, -0.12772477, 0.18616444, -0.33645535, -0.007799566, -0.32610577], [0.09211463, 0.37183136, -0.16936111, -0.48081094, 0.4510659, -0.26915663, 0.3315332, -0.47409946], [-0.116140485, -0.45325327, -0.15447628, -0.3688602, 0.30963463, -0.09212339, -0.35268813, 0.11098063], [0.29427803, 0.433334, -0.48883963, -0.46928447, 0.4975065, 0.3038078, -0.044661045, -0.10859859], [0.17170733, 0.46524984, 0.23364067, -0.01168102, -0.084338546, -0.35397476, 0.40209305, 0.24697125], [0.13627416, 0.078165114, 0.03899026, -0.4477538, -0.07856071, 0.06334549, 0.4463697, -0.16363168]]> : tensor<11x8xf32>
    %8 = stablehlo.reshape %0 : (tensor<1x1xi32>) -> tensor<1xi32>
    %9 = "stablehlo.gather"(%7, %8) <{dimension_numbers = #stablehlo.gather<offset_dims = [1], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, slice_sizes = array<i64: 1, 8>}> : (tensor<11x8xf32>, tensor<1xi32>) -> tensor<1x8xf32>
    %10 = stablehlo.constant dense<[[-0.26315695, -0.04002559, -0.3110497, 0.24189961, 0.21700984, -0.38277084, -0.29420006, -0.027658522], [0.025208354, 0.1966945, 0.20417678, -0.3928101, 0.067551434, 0.28875124, -0.03659743, -0.053058863], [-0.4859587, -0.15792423, 0.48118693, -0.08176017, 0.40702897, 0.16736305, 0.24077779, -0.10940993], [-0.25278723, -0.35094255, -0.31778592, -0.35361242, -0.427199, -0.13178313, 0.018304646, -0.16760367], [-0.20253658, 0.089634, 0.2859589, -0.029203832, -0.17730284, 0.31634068, 0.2734937, 0.35792547], [0.1902315, 0.3646205, 0.21454239, 0.42884398, -0.20990348, -0.3373466, 0.38918978, 0.41584122], [0.3899812, -0.27408135, 0.022959173, 0.37901515, -0.49849463, -0.48751938, 0.124275506, -0.06295395], [-0.15096933, 0.11128211, 0.15103048, 0.27629066, -0.043364227, 0.46657056, -0.353126, 0.26632184]]> : tensor<8x8xf32>
    %11 = stablehlo.dot_general %9, %10, contracting_dims = [1] x [0], precision = [HIGHEST, HIGHEST] : (tensor<1x8xf32>, tensor<8x8xf32>) -> tensor<1x8xf32>
    %12 = stablehlo.constant dense<[[-0.2627694, 0.050678194, 0.37365854, 0.27891594], [-0.11652386, 0.36494005, 0.136837, -0.11150551], [-0.46607655, 0.254143, -0.34209758, 0.29200208], [0.044412673, 0.24056888, 0.19172925, 0.4130364], [-0.3328045, -0.14272392, -0.22022891, -0.19497949], [0.09811592, -0.2698081, -0.088989556, -0.037700474], [-0.1353895, 0.09086859, 0.28154105, 0.41346276], [0.382654, 0.48552912, -0.3940916, -0.012481332]]> : tensor<8x4xf32>
    %13 = stablehlo.dot_general %9, %12, contracting_dims = [1] x [0], precision = [HIGHEST, HIGHEST] : (tensor<1x8xf32>, tensor<8x4xf32>) -> tensor<1x4xf32>
    %14 = stablehlo.constant dense<[[-0.26238185, 0.14138192, 0.058366835, 0.31593233], [-0.45005763, 0.11265093, -0.432126, -0.19535255], [0.0426386, 0.3115915, 0.111628056, -0.02318573], [0.021273851, 0.19238651, 0.42005593, -0.120868385], [-0.1796503, -0.1275236, 0.07835531, -0.30819875], [-0.21079707, 0.29302073, -0.41875684, 0.03400892], [-0.017991781, -0.46732032, -0.11913192, 0.18053794], [0.19250709, 0.10284132, 0.1935122, 0.14264095]]> : tensor<8x4xf32>
    %15 = stablehlo.dot_general %9, %14, contracting_dims = [1] x [0], precision = [HIGHEST, HIGHEST] : (tensor<1x8xf32>, tensor<8x4xf32>) -> tensor<1x4xf32>
    %16 = stablehlo.constant dense<2> : tensor<1xi32>
    %17 = stablehlo.divide %4, %16 : tensor<1xi32>
    %18 = stablehlo.remainder %4, %16 : tensor<1xi32>
    %19 = stablehlo.reshape %17 : (tensor<1xi32>) -> tensor<1x1xi32>
    %20 = stablehlo.reshape %18 : (tensor<1xi32>) -> tensor<1x1xi32>
    %21 = stablehlo.concatenate %19, %20, dim = 1 : (tensor<1x1xi32>, tensor<1x1xi32>) -> tensor<1x2xi32>
    %22 = stablehlo.reshape %13 : (tensor<1x4xf32>) -> tensor<1x2x2xf32>
    %23 = "stablehlo.scatter"(%5, %21, %22) <{scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1, 2], inserted_window_dims = [0, 1], scatter_dims_to_operand_dims = [0, 1], index_vector_dim = 1>, unique_indices = false}> ({
    ^bb0(%old: tensor<f32>, %new: tensor<f32>):
      stablehlo.return %new : tensor<f32>
    }) : (tensor<6x2x2x2xf32>, tensor<1x2xi32>, tensor<1x2x2xf32>) -> tensor<6x2x2x2xf32>
    %24 = stablehlo.reshape %15 : (tensor<1x4xf32>) -> tensor<1x2x2xf32>
    %25 = "stablehlo.scatter"(%6, %21, %24) <{scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1, 2], inserted_window_dims = [0, 1], scatter_dims_to_operand_dims = [0, 1], index_vector_dim = 1>, unique_indices = false}> ({
    ^bb0(%old: tensor<f32>, %new: tensor<f32>):
      stablehlo.return %new : tensor<f32>
    }) : (tensor<6x2x2x2xf32>, tensor<1x2xi32>, tensor<1x2x2xf32>) -> tensor<6x2x2x2xf32>
    %26 = stablehlo.reshape %11 : (tensor<1x8xf32>) -> tensor<1x4x2xf32>
    %27 = stablehlo.reshape %23 : (tensor<6x2x2x2xf32>) -> tensor<6x8xf32>
    %28 = "stablehlo.gather"(%27, %2) <{dimension_numbers = #stablehlo.gather<offset_dims = [2], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 2>, slice_sizes = array<i64: 1, 8>}> : (tensor<6x8xf32>, tensor<1x2xi32>) -> tensor<1x2x8xf32>
    %29 = stablehlo.reshape %28 : (tensor<1x2x8xf32>) -> tensor<1x4x4xf32>
    %30 = stablehlo.reshape %25 : (tensor<6x2x2x2xf32>) -> tensor<6x8xf32>
    %31 = "stablehlo.gather"(%30, %2) <{dimension_numbers = #stablehlo.gather<offset_dims = [2], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 2>, slice_sizes = array<i64: 1, 8>}> : (tensor<6x8xf32>, tensor<1x2xi32>) -> tensor<1x2x8xf32>
    %32 = stablehlo.reshape %31 : (tensor<1x2x8xf32>) -> tensor<1x4x4xf32>
    %33 = stablehlo.iota dim = 2 : tensor<1x4x4xi32>
    %34 = stablehlo.broadcast_in_dim %3, dims = [0] : (tensor<1xi32>) -> tensor<1x4x4xi32>
    %35 = stablehlo.compare LT, %33, %34, SIGNED : (tensor<1x4x4xi32>, tensor<1x4x4xi32>) -> tensor<1x4x4xi1>
    %36 = stablehlo.constant dense<0.70710677> : tensor<1x4x2xf32>
    %37 = stablehlo.multiply %26, %36 : tensor<1x4x2xf32>
    %38 = stablehlo.constant dense<[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]> : tensor<4x2xf32>
    %39 = stablehlo.broadcast_in_dim %38, dims = [1, 2] : (tensor<4x2xf32>) -> tensor<1x4x2x2xf32>
    %40 = stablehlo.broadcast_in_dim %37, dims = [0, 1, 3] : (tensor<1x4x2xf32>) -> tensor<1x4x2x2xf32>
    %41 = stablehlo.multiply %40, %39 : tensor<1x4x2x2xf32>
    %42 = stablehlo.reshape %41 : (tensor<1x4x2x2xf32>) -> tensor<1x4x4xf32>
    %43 = stablehlo.dot_general %42, %29, batching_dims = [0] x [0], contracting_dims = [2] x [2], precision = [HIGHEST, HIGHEST] : (tensor<1x4x4xf32>, tensor<1x4x4xf32>) -> tensor<1x4x4xf32>
    %44 = stablehlo.constant dense<0xFF800000> : tensor<1x4x4xf32>
    %45 = stablehlo.select %35, %43, %44 : tensor<1x4x4xi1>, tensor<1x4x4xf32>
    %46 = stablehlo.constant dense<0xFF800000> : tensor<f32>
    %47 = stablehlo.reduce(%45 init: %46) applies stablehlo.maximum across dimensions = [2] : (tensor<1x4x4xf32>, tensor<f32>) -> tensor<1x4xf32>
    %48 = stablehlo.broadcast_in_dim %47, dims = [0, 1] : (tensor<1x4xf32>) -> tensor<1x4x4xf32>
    %49 = stablehlo.subtract %45, %48 : tensor<1x4x4xf32>
    %50 = stablehlo.exponential %49 : tensor<1x4x4xf32>
    %51 = stablehlo.constant dense<0.0> : tensor<f32>
    %52 = stablehlo.reduce(%50 init: %51) applies stablehlo.add across dimensions = [2] : (tensor<1x4x4xf32>, tensor<f32>) -> tensor<1x4xf32>
    %53 = stablehlo.dot_general %50, %32, batching_dims = [0] x [0], contracting_dims = [2] x [1], precision = [HIGHEST, HIGHEST] : (tensor<1x4x4xf32>, tensor<1x4x4xf32>) -> tensor<1x4x4xf32>
    %54 = stablehlo.reshape %53 : (tensor<1x4x4xf32>) -> tensor<1x4x2x2xf32>
    %55 = stablehlo.multiply %54, %39 : tensor<1x4x2x2xf32>
    %56 = stablehlo.reduce(%55 init: %51) applies stablehlo.add across dimensions = [2] : (tensor<1x4x2x2xf32>, tensor<f32>) -> tensor<1x4x2xf32>
    %57 = stablehlo.broadcast_in_dim %52, dims = [0, 1] : (tensor<1x4xf32>) -> tensor<1x4x2xf32>
    %58 = stablehlo.divide %56, %57 : tensor<1x4x2xf32>
    %59 = stablehlo.reshape %58 : (tensor<1x4x2xf32>) -> tensor<1x8xf32>
    %60 = stablehlo.constant dense<[[-0.2619943, 0.2320857, -0.25692493, 0.35294873, 0.21640861, -0.13963819, -0.0010889173, -0.2791996, -0.44864625, 0.36904, -0.4346463], [-0.3383736, -0.0018649101, 0.14420414, -0.3516174, 0.34522682, -0.026496112, -0.112323284, 0.37693954, -0.421418, 0.48028994, -0.14415044], [0.2514758, 0.105718315, 0.099405944, -0.025509238, 0.48019505, -0.05238688, 0.0023601055, -0.2798465, -0.21888405, 0.2977633, -0.3125993], [-0.09118867, 0.4780808, -0.26095665, 0.39241916, -0.21765506, -0.031165957, -0.20252258, 0.38773566, 0.03350544, -0.10670382, 0.0985502], [-0.39810735, -0.34002054, -0.41984206, -0.35831785, 0.2835809, -0.21181941, -0.40008008, -0.04150653, -0.3471762, -0.14260751, -0.49749756], [0.17048252, -0.25545573, -0.19511163, 0.06755078, 0.21174306, -0.102360845, 0.14265233, -0.35443962, -0.26765454, -0.40731275, 0.066327095], [0.4179482, 0.4480073, -0.4085858, -0.01298666, -0.34580696, -0.04832232, -0.41895926, 0.12654543, 0.29417276, 0.252661, -0.22336113], [0.06686902, 0.4338206, -0.4410959, 0.18462032, 0.394145, -0.4577728, 0.06807357, 0.48048335, -0.17179483, 0.4883132, -0.21695411]]> : tensor<8x11xf32>
    %61 = stablehlo.dot_general %59, %60, contracting_dims = [1] x [0], precision = [HIGHEST, HIGHEST] : (tensor<1x8xf32>, tensor<8x11xf32>) -> tensor<1x11xf32>
    %62 = stablehlo.reshape %61 : (tensor<1x11xf32>) -> tensor<1x1x11xf32>
    return %62, %23, %25 : tensor<1x1x11xf32>, tensor<6x2x2x2xf32>, tensor<6x2x2x2xf32>
  }
}
