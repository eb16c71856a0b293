module @jit_mlp_first_bias attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["data"=2, "model"=4]> {stablehlo.mesh = {axes = [{name = "data", size = 2 : i64}, {name = "model", size = 4 : i64}]}}
  func.func public @main(%arg0: tensor<8x12xf32>, %arg1: tensor<12x16xf32>, %arg2: tensor<16xf32>, %arg3: tensor<16x12xf32>, %arg4: tensor<12xf32>) -> (tensor<8x12xf32> {jax.result_info = "result"}) {
    %0 = sdy.manual_computation(%arg0, %arg1, %arg2, %arg3, %arg4) in_shardings=[<@mesh, [{"data"}, {}]>, <@mesh, [{}, {"model"}]>, <@mesh, [{"model"}]>, <@mesh, [{"model"}, {}]>, <@mesh, [{}]>] out_shardings=[<@mesh, [{"data"}, {}]>] manual_axes={"data", "model"} (%arg5: tensor<4x12xf32>, %arg6: tensor<12x4xf32>, %arg7: tensor<4xf32>, %arg8: tensor<4x12xf32>, %arg9: tensor<12xf32>) {
      %c = stablehlo.constant dense<1> : tensor<ui32>
      %c_0 = stablehlo.constant dense<4> : tensor<ui32>
      %1 = stablehlo.partition_id : tensor<ui32>
      %2 = stablehlo.divide %1, %c : tensor<ui32>
      %3 = stablehlo.remainder %2, %c_0 : tensor<ui32>
      %4 = stablehlo.convert %3 : (tensor<ui32>) -> tensor<i32>
      %c_1 = stablehlo.constant dense<0> : tensor<i32>
      %5 = stablehlo.compare EQ, %4, %c_1, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
      %6 = stablehlo.dot_general %arg5, %arg6, contracting_dims = [1] x [0], precision = [DEFAULT, DEFAULT] : (tensor<4x12xf32>, tensor<12x4xf32>) -> tensor<4x4xf32>
      %7 = stablehlo.broadcast_in_dim %arg7, dims = [1] : (tensor<4xf32>) -> tensor<1x4xf32>
      %8 = stablehlo.broadcast_in_dim %7, dims = [0, 1] : (tensor<1x4xf32>) -> tensor<4x4xf32>
      %9 = stablehlo.add %6, %8 : tensor<4x4xf32>
      %10 = stablehlo.tanh %9 : tensor<4x4xf32>
      %11 = stablehlo.dot_general %10, %arg8, contracting_dims = [1] x [0], precision = [DEFAULT, DEFAULT] : (tensor<4x4xf32>, tensor<4x12xf32>) -> tensor<4x12xf32>
      %cst = stablehlo.constant dense<0.000000e+00> : tensor<f32>
      %12 = func.call @_where(%5, %arg9, %cst) : (tensor<i1>, tensor<12xf32>, tensor<f32>) -> tensor<12xf32>
      %13 = stablehlo.broadcast_in_dim %12, dims = [1] : (tensor<12xf32>) -> tensor<1x12xf32>
      %14 = stablehlo.broadcast_in_dim %13, dims = [0, 1] : (tensor<1x12xf32>) -> tensor<4x12xf32>
      %15 = stablehlo.add %11, %14 : tensor<4x12xf32>
      %16 = "stablehlo.all_reduce"(%15) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3], [4, 5, 6, 7]]> : tensor<2x4xi64>, use_global_device_ids}> ({
      ^bb0(%arg10: tensor<f32>, %arg11: tensor<f32>):
        %17 = stablehlo.add %arg10, %arg11 : tensor<f32>
        stablehlo.return %17 : tensor<f32>
      }) : (tensor<4x12xf32>) -> tensor<4x12xf32>
      sdy.return %16 : tensor<4x12xf32>
    } : (tensor<8x12xf32>, tensor<12x16xf32>, tensor<16xf32>, tensor<16x12xf32>, tensor<12xf32>) -> tensor<8x12xf32>
    return %0 : tensor<8x12xf32>
  }
  func.func private @_where(%arg0: tensor<i1>, %arg1: tensor<12xf32>, %arg2: tensor<f32>) -> tensor<12xf32> {
    %0 = stablehlo.convert %arg2 : tensor<f32>
    %1 = stablehlo.broadcast_in_dim %0, dims = [] : (tensor<f32>) -> tensor<12xf32>
    %2 = stablehlo.select %arg0, %arg1, %1 : tensor<i1>, tensor<12xf32>
    return %2 : tensor<12xf32>
  }
}
