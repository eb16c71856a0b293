module @jit_attention_ranks attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["data"=2, "model"=4]> {stablehlo.mesh = {axes = [{name = "data", size = 2 : i64}, {name = "model", size = 4 : i64}]}}
  func.func public @main(%arg0: tensor<4x6x12xf32>, %arg1: tensor<12x16xf32>, %arg2: tensor<12x16xf32>, %arg3: tensor<12x16xf32>, %arg4: tensor<16x12xf32>) -> (tensor<4x6x12xf32> {jax.result_info = "result"}) {
    %0 = sdy.manual_computation(%arg0, %arg1, %arg2, %arg3, %arg4) in_shardings=[<@mesh, [{"data"}, {}, {}]>, <@mesh, [{}, {"model"}]>, <@mesh, [{}, {"model"}]>, <@mesh, [{}, {"model"}]>, <@mesh, [{"model"}, {}]>] out_shardings=[<@mesh, [{"data"}, {}, {}]>] manual_axes={"data", "model"} (%arg5: tensor<2x6x12xf32>, %arg6: tensor<12x4xf32>, %arg7: tensor<12x4xf32>, %arg8: tensor<12x4xf32>, %arg9: tensor<4x12xf32>) {
      %1 = stablehlo.dot_general %arg5, %arg6, contracting_dims = [2] x [0], precision = [DEFAULT, DEFAULT] : (tensor<2x6x12xf32>, tensor<12x4xf32>) -> tensor<2x6x4xf32>
      %2 = stablehlo.reshape %1 : (tensor<2x6x4xf32>) -> tensor<2x6x1x4xf32>
      %3 = stablehlo.dot_general %arg5, %arg7, contracting_dims = [2] x [0], precision = [DEFAULT, DEFAULT] : (tensor<2x6x12xf32>, tensor<12x4xf32>) -> tensor<2x6x4xf32>
      %4 = stablehlo.reshape %3 : (tensor<2x6x4xf32>) -> tensor<2x6x1x4xf32>
      %5 = stablehlo.dot_general %arg5, %arg8, contracting_dims = [2] x [0], precision = [DEFAULT, DEFAULT] : (tensor<2x6x12xf32>, tensor<12x4xf32>) -> tensor<2x6x4xf32>
      %6 = stablehlo.reshape %5 : (tensor<2x6x4xf32>) -> tensor<2x6x1x4xf32>
      %7 = stablehlo.dot_general %2, %4, batching_dims = [0, 2] x [0, 2], contracting_dims = [3] x [3], precision = [DEFAULT, DEFAULT] : (tensor<2x6x1x4xf32>, tensor<2x6x1x4xf32>) -> tensor<2x1x6x6xf32>
      %cst = stablehlo.constant dense<5.000000e-01> : tensor<f32>
      %8 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<2x1x6x6xf32>
      %9 = stablehlo.multiply %7, %8 : tensor<2x1x6x6xf32>
      %10 = stablehlo.iota dim = 0 : tensor<6xi32>
      %11 = stablehlo.broadcast_in_dim %10, dims = [0] : (tensor<6xi32>) -> tensor<6x1xi32>
      %12 = stablehlo.iota dim = 0 : tensor<6xi32>
      %13 = stablehlo.broadcast_in_dim %12, dims = [1] : (tensor<6xi32>) -> tensor<1x6xi32>
      %14 = stablehlo.broadcast_in_dim %11, dims = [0, 1] : (tensor<6x1xi32>) -> tensor<6x6xi32>
      %15 = stablehlo.broadcast_in_dim %13, dims = [0, 1] : (tensor<1x6xi32>) -> tensor<6x6xi32>
      %16 = stablehlo.compare GE, %14, %15, SIGNED : (tensor<6x6xi32>, tensor<6x6xi32>) -> tensor<6x6xi1>
      %cst_0 = stablehlo.constant dense<-1.000000e+09> : tensor<f32>
      %17 = func.call @_where(%16, %9, %cst_0) : (tensor<6x6xi1>, tensor<2x1x6x6xf32>, tensor<f32>) -> tensor<2x1x6x6xf32>
      %cst_1 = stablehlo.constant dense<0xFF800000> : tensor<f32>
      %18 = stablehlo.reduce(%17 init: %cst_1) applies stablehlo.maximum across dimensions = [3] : (tensor<2x1x6x6xf32>, tensor<f32>) -> tensor<2x1x6xf32>
      %19 = stablehlo.broadcast_in_dim %18, dims = [0, 1, 2] : (tensor<2x1x6xf32>) -> tensor<2x1x6x1xf32>
      %20 = stablehlo.broadcast_in_dim %19, dims = [0, 1, 2, 3] : (tensor<2x1x6x1xf32>) -> tensor<2x1x6x6xf32>
      %21 = stablehlo.subtract %17, %20 : tensor<2x1x6x6xf32>
      %22 = stablehlo.exponential %21 : tensor<2x1x6x6xf32>
      %cst_2 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
      %23 = stablehlo.reduce(%22 init: %cst_2) applies stablehlo.add across dimensions = [3] : (tensor<2x1x6x6xf32>, tensor<f32>) -> tensor<2x1x6xf32>
      %24 = stablehlo.broadcast_in_dim %23, dims = [0, 1, 2] : (tensor<2x1x6xf32>) -> tensor<2x1x6x1xf32>
      %25 = stablehlo.broadcast_in_dim %24, dims = [0, 1, 2, 3] : (tensor<2x1x6x1xf32>) -> tensor<2x1x6x6xf32>
      %26 = stablehlo.divide %22, %25 : tensor<2x1x6x6xf32>
      %27 = stablehlo.dot_general %6, %26, batching_dims = [0, 2] x [0, 1], contracting_dims = [1] x [3], precision = [DEFAULT, DEFAULT] : (tensor<2x6x1x4xf32>, tensor<2x1x6x6xf32>) -> tensor<2x1x4x6xf32>
      %28 = stablehlo.transpose %27, dims = [0, 3, 1, 2] : (tensor<2x1x4x6xf32>) -> tensor<2x6x1x4xf32>
      %29 = stablehlo.reshape %28 : (tensor<2x6x1x4xf32>) -> tensor<2x6x4xf32>
      %30 = stablehlo.dot_general %29, %arg9, contracting_dims = [2] x [0], precision = [DEFAULT, DEFAULT] : (tensor<2x6x4xf32>, tensor<4x12xf32>) -> tensor<2x6x12xf32>
      %31 = "stablehlo.all_reduce"(%30) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3], [4, 5, 6, 7]]> : tensor<2x4xi64>, use_global_device_ids}> ({
      ^bb0(%arg10: tensor<f32>, %arg11: tensor<f32>):
        %32 = stablehlo.add %arg10, %arg11 : tensor<f32>
        stablehlo.return %32 : tensor<f32>
      }) : (tensor<2x6x12xf32>) -> tensor<2x6x12xf32>
      sdy.return %31 : tensor<2x6x12xf32>
    } : (tensor<4x6x12xf32>, tensor<12x16xf32>, tensor<12x16xf32>, tensor<12x16xf32>, tensor<16x12xf32>) -> tensor<4x6x12xf32>
    return %0 : tensor<4x6x12xf32>
  }
  func.func private @_where(%arg0: tensor<6x6xi1>, %arg1: tensor<2x1x6x6xf32>, %arg2: tensor<f32>) -> tensor<2x1x6x6xf32> {
    %0 = stablehlo.convert %arg2 : tensor<f32>
    %1 = stablehlo.broadcast_in_dim %arg0, dims = [2, 3] : (tensor<6x6xi1>) -> tensor<2x1x6x6xi1>
    %2 = stablehlo.broadcast_in_dim %0, dims = [] : (tensor<f32>) -> tensor<2x1x6x6xf32>
    %3 = stablehlo.select %1, %arg1, %2 : tensor<2x1x6x6xi1>, tensor<2x1x6x6xf32>
    return %3 : tensor<2x1x6x6xf32>
  }
}
