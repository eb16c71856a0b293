module @jit_mlp_shared_bias attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["data"=2, "model"=4]> {stablehlo.mesh = {axes = [{name = "data", size = 2 : i64}, {name = "model", size = 4 : i64}]}}
  func.func public @main(%arg0: tensor<8x12xf32>, %arg1: tensor<12x16xf32>, %arg2: tensor<16xf32>, %arg3: tensor<16x12xf32>, %arg4: tensor<12xf32>) -> (tensor<8x12xf32> {jax.result_info = "result"}) {
    %0 = sdy.manual_computation(%arg0, %arg1, %arg2, %arg3, %arg4) in_shardings=[<@mesh, [{"data"}, {}]>, <@mesh, [{}, {"model"}]>, <@mesh, [{"model"}]>, <@mesh, [{"model"}, {}]>, <@mesh, [{}]>] out_shardings=[<@mesh, [{"data"}, {}]>] manual_axes={"data", "model"} (%arg5: tensor<4x12xf32>, %arg6: tensor<12x4xf32>, %arg7: tensor<4xf32>, %arg8: tensor<4x12xf32>, %arg9: tensor<12xf32>) {
      %1 = stablehlo.dot_general %arg5, %arg6, contracting_dims = [1] x [0], precision = [DEFAULT, DEFAULT] : (tensor<4x12xf32>, tensor<12x4xf32>) -> tensor<4x4xf32>
      %2 = stablehlo.broadcast_in_dim %arg7, dims = [1] : (tensor<4xf32>) -> tensor<1x4xf32>
      %3 = stablehlo.broadcast_in_dim %2, dims = [0, 1] : (tensor<1x4xf32>) -> tensor<4x4xf32>
      %4 = stablehlo.add %1, %3 : tensor<4x4xf32>
      %5 = stablehlo.tanh %4 : tensor<4x4xf32>
      %6 = stablehlo.dot_general %5, %arg8, contracting_dims = [1] x [0], precision = [DEFAULT, DEFAULT] : (tensor<4x4xf32>, tensor<4x12xf32>) -> tensor<4x12xf32>
      %cst = stablehlo.constant dense<4.000000e+00> : tensor<f32>
      %7 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<12xf32>
      %8 = stablehlo.divide %arg9, %7 : tensor<12xf32>
      %9 = stablehlo.broadcast_in_dim %8, dims = [1] : (tensor<12xf32>) -> tensor<1x12xf32>
      %10 = stablehlo.broadcast_in_dim %9, dims = [0, 1] : (tensor<1x12xf32>) -> tensor<4x12xf32>
      %11 = stablehlo.add %6, %10 : tensor<4x12xf32>
      %12 = "stablehlo.all_reduce"(%11) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3], [4, 5, 6, 7]]> : tensor<2x4xi64>, use_global_device_ids}> ({
      ^bb0(%arg10: tensor<f32>, %arg11: tensor<f32>):
        %13 = stablehlo.add %arg10, %arg11 : tensor<f32>
        stablehlo.return %13 : tensor<f32>
      }) : (tensor<4x12xf32>) -> tensor<4x12xf32>
      sdy.return %12 : tensor<4x12xf32>
    } : (tensor<8x12xf32>, tensor<12x16xf32>, tensor<16xf32>, tensor<16x12xf32>, tensor<12xf32>) -> tensor<8x12xf32>
    return %0 : tensor<8x12xf32>
  }
}
