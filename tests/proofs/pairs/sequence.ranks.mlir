module @jit_sequence_ranks attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["data"=2, "model"=4]> {stablehlo.mesh = {axes = [{name = "data", size = 2 : i64}, {name = "model", size = 4 : i64}]}}
  func.func public @main(%arg0: tensor<4x8x12xf32>, %arg1: tensor<12xf32>, %arg2: tensor<12x16xf32>, %arg3: tensor<16x12xf32>) -> (tensor<4x8x12xf32> {jax.result_info = "result"}) {
    %0 = sdy.manual_computation(%arg0, %arg1, %arg2, %arg3) in_shardings=[<@mesh, [{"data"}, {"model"}, {}]>, <@mesh, [{}]>, <@mesh, [{}, {"model"}]>, <@mesh, [{"model"}, {}]>] out_shardings=[<@mesh, [{"data"}, {"model"}, {}]>] manual_axes={"data", "model"} (%arg4: tensor<2x2x12xf32>, %arg5: tensor<12xf32>, %arg6: tensor<12x4xf32>, %arg7: tensor<4x12xf32>) {
      %cst = stablehlo.constant dense<0.000000e+00> : tensor<f32>
      %1 = stablehlo.reduce(%arg4 init: %cst) applies stablehlo.add across dimensions = [2] : (tensor<2x2x12xf32>, tensor<f32>) -> tensor<2x2xf32>
      %2 = stablehlo.broadcast_in_dim %1, dims = [0, 1] : (tensor<2x2xf32>) -> tensor<2x2x1xf32>
      %cst_0 = stablehlo.constant dense<1.200000e+01> : tensor<f32>
      %3 = stablehlo.broadcast_in_dim %cst_0, dims = [] : (tensor<f32>) -> tensor<2x2x1xf32>
      %4 = stablehlo.divide %2, %3 : tensor<2x2x1xf32>
      %5 = stablehlo.broadcast_in_dim %4, dims = [0, 1, 2] : (tensor<2x2x1xf32>) -> tensor<2x2x12xf32>
      %6 = stablehlo.subtract %arg4, %5 : tensor<2x2x12xf32>
      %7 = stablehlo.multiply %6, %6 : tensor<2x2x12xf32>
      %cst_1 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
      %8 = stablehlo.reduce(%7 init: %cst_1) applies stablehlo.add across dimensions = [2] : (tensor<2x2x12xf32>, tensor<f32>) -> tensor<2x2xf32>
      %9 = stablehlo.broadcast_in_dim %8, dims = [0, 1] : (tensor<2x2xf32>) -> tensor<2x2x1xf32>
      %cst_2 = stablehlo.constant dense<1.200000e+01> : tensor<f32>
      %10 = stablehlo.broadcast_in_dim %cst_2, dims = [] : (tensor<f32>) -> tensor<2x2x1xf32>
      %11 = stablehlo.divide %9, %10 : tensor<2x2x1xf32>
      %12 = stablehlo.broadcast_in_dim %4, dims = [0, 1, 2] : (tensor<2x2x1xf32>) -> tensor<2x2x12xf32>
      %13 = stablehlo.subtract %arg4, %12 : tensor<2x2x12xf32>
      %cst_3 = stablehlo.constant dense<9.99999974E-6> : tensor<f32>
      %14 = stablehlo.broadcast_in_dim %cst_3, dims = [] : (tensor<f32>) -> tensor<2x2x1xf32>
      %15 = stablehlo.add %11, %14 : tensor<2x2x1xf32>
      %16 = stablehlo.rsqrt %15 : tensor<2x2x1xf32>
      %17 = stablehlo.broadcast_in_dim %16, dims = [0, 1, 2] : (tensor<2x2x1xf32>) -> tensor<2x2x12xf32>
      %18 = stablehlo.multiply %13, %17 : tensor<2x2x12xf32>
      %19 = stablehlo.broadcast_in_dim %arg5, dims = [2] : (tensor<12xf32>) -> tensor<1x1x12xf32>
      %20 = stablehlo.broadcast_in_dim %19, dims = [0, 1, 2] : (tensor<1x1x12xf32>) -> tensor<2x2x12xf32>
      %21 = stablehlo.multiply %18, %20 : tensor<2x2x12xf32>
      %22 = "stablehlo.all_gather"(%21) <{all_gather_dim = 1 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3], [4, 5, 6, 7]]> : tensor<2x4xi64>, use_global_device_ids}> : (tensor<2x2x12xf32>) -> tensor<2x8x12xf32>
      %23 = stablehlo.dot_general %22, %arg6, contracting_dims = [2] x [0], precision = [DEFAULT, DEFAULT] : (tensor<2x8x12xf32>, tensor<12x4xf32>) -> tensor<2x8x4xf32>
      %24 = stablehlo.tanh %23 : tensor<2x8x4xf32>
      %25 = stablehlo.dot_general %24, %arg7, contracting_dims = [2] x [0], precision = [DEFAULT, DEFAULT] : (tensor<2x8x4xf32>, tensor<4x12xf32>) -> tensor<2x8x12xf32>
      %26 = "stablehlo.reduce_scatter"(%25) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3], [4, 5, 6, 7]]> : tensor<2x4xi64>, scatter_dimension = 1 : i64, use_global_device_ids}> ({
      ^bb0(%arg8: tensor<f32>, %arg9: tensor<f32>):
        %28 = stablehlo.add %arg8, %arg9 : tensor<f32>
        stablehlo.return %28 : tensor<f32>
      }) : (tensor<2x8x12xf32>) -> tensor<2x2x12xf32>
      %27 = stablehlo.add %arg4, %26 : tensor<2x2x12xf32>
      sdy.return %27 : tensor<2x2x12xf32>
    } : (tensor<4x8x12xf32>, tensor<12xf32>, tensor<12x16xf32>, tensor<16x12xf32>) -> tensor<4x8x12xf32>
    return %0 : tensor<4x8x12xf32>
  }
}
