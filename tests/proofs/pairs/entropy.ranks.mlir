module @jit_entropy_ranks attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["data"=2, "model"=4]> {stablehlo.mesh = {axes = [{name = "data", size = 2 : i64}, {name = "model", size = 4 : i64}]}}
  func.func public @main(%arg0: tensor<8x12xf32>, %arg1: tensor<12x32xf32>, %arg2: tensor<8xi32>) -> (tensor<f32> {jax.result_info = "result"}) {
    %0 = sdy.manual_computation(%arg0, %arg1, %arg2) in_shardings=[<@mesh, [{"data"}, {}]>, <@mesh, [{}, {"model"}]>, <@mesh, [{"data"}]>] out_shardings=[<@mesh, []>] manual_axes={"data", "model"} (%arg3: tensor<4x12xf32>, %arg4: tensor<12x8xf32>, %arg5: tensor<4xi32>) {
      %1 = stablehlo.dot_general %arg3, %arg4, contracting_dims = [1] x [0], precision = [DEFAULT, DEFAULT] : (tensor<4x12xf32>, tensor<12x8xf32>) -> tensor<4x8xf32>
      %cst = stablehlo.constant dense<0xFF800000> : tensor<f32>
      %2 = stablehlo.reduce(%1 init: %cst) applies stablehlo.maximum across dimensions = [1] : (tensor<4x8xf32>, tensor<f32>) -> tensor<4xf32>
      %3 = stablehlo.broadcast_in_dim %2, dims = [0] : (tensor<4xf32>) -> tensor<4x1xf32>
      %4 = "stablehlo.all_reduce"(%3) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3], [4, 5, 6, 7]]> : tensor<2x4xi64>, use_global_device_ids}> ({
      ^bb0(%arg6: tensor<f32>, %arg7: tensor<f32>):
        %32 = stablehlo.maximum %arg6, %arg7 : tensor<f32>
        stablehlo.return %32 : tensor<f32>
      }) : (tensor<4x1xf32>) -> tensor<4x1xf32>
      %5 = stablehlo.broadcast_in_dim %4, dims = [0, 1] : (tensor<4x1xf32>) -> tensor<4x8xf32>
      %6 = stablehlo.subtract %1, %5 : tensor<4x8xf32>
      %7 = stablehlo.exponential %6 : tensor<4x8xf32>
      %cst_0 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
      %8 = stablehlo.reduce(%7 init: %cst_0) applies stablehlo.add across dimensions = [1] : (tensor<4x8xf32>, tensor<f32>) -> tensor<4xf32>
      %9 = "stablehlo.all_reduce"(%8) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3], [4, 5, 6, 7]]> : tensor<2x4xi64>, use_global_device_ids}> ({
      ^bb0(%arg6: tensor<f32>, %arg7: tensor<f32>):
        %32 = stablehlo.add %arg6, %arg7 : tensor<f32>
        stablehlo.return %32 : tensor<f32>
      }) : (tensor<4xf32>) -> tensor<4xf32>
      %10 = stablehlo.iota dim = 0 : tensor<8xi32>
      %c = stablehlo.constant dense<1> : tensor<ui32>
      %c_1 = stablehlo.constant dense<4> : tensor<ui32>
      %11 = stablehlo.partition_id : tensor<ui32>
      %12 = stablehlo.divide %11, %c : tensor<ui32>
      %13 = stablehlo.remainder %12, %c_1 : tensor<ui32>
      %14 = stablehlo.convert %13 : (tensor<ui32>) -> tensor<i32>
      %c_2 = stablehlo.constant dense<8> : tensor<i32>
      %15 = stablehlo.multiply %14, %c_2 : tensor<i32>
      %16 = stablehlo.broadcast_in_dim %15, dims = [] : (tensor<i32>) -> tensor<8xi32>
      %17 = stablehlo.add %10, %16 : tensor<8xi32>
      %18 = stablehlo.broadcast_in_dim %arg5, dims = [0] : (tensor<4xi32>) -> tensor<4x1xi32>
      %19 = stablehlo.broadcast_in_dim %17, dims = [1] : (tensor<8xi32>) -> tensor<1x8xi32>
      %20 = stablehlo.broadcast_in_dim %18, dims = [0, 1] : (tensor<4x1xi32>) -> tensor<4x8xi32>
      %21 = stablehlo.broadcast_in_dim %19, dims = [0, 1] : (tensor<1x8xi32>) -> tensor<4x8xi32>
      %22 = stablehlo.compare EQ, %20, %21, SIGNED : (tensor<4x8xi32>, tensor<4x8xi32>) -> tensor<4x8xi1>
      %cst_3 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
      %23 = func.call @_where(%22, %6, %cst_3) : (tensor<4x8xi1>, tensor<4x8xf32>, tensor<f32>) -> tensor<4x8xf32>
      %cst_4 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
      %24 = stablehlo.reduce(%23 init: %cst_4) applies stablehlo.add across dimensions = [1] : (tensor<4x8xf32>, tensor<f32>) -> tensor<4xf32>
      %25 = "stablehlo.all_reduce"(%24) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3], [4, 5, 6, 7]]> : tensor<2x4xi64>, use_global_device_ids}> ({
      ^bb0(%arg6: tensor<f32>, %arg7: tensor<f32>):
        %32 = stablehlo.add %arg6, %arg7 : tensor<f32>
        stablehlo.return %32 : tensor<f32>
      }) : (tensor<4xf32>) -> tensor<4xf32>
      %26 = stablehlo.log %9 : tensor<4xf32>
      %27 = stablehlo.subtract %26, %25 : tensor<4xf32>
      %cst_5 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
      %28 = stablehlo.reduce(%27 init: %cst_5) applies stablehlo.add across dimensions = [0] : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
      %cst_6 = stablehlo.constant dense<4.000000e+00> : tensor<f32>
      %29 = stablehlo.divide %28, %cst_6 : tensor<f32>
      %30 = "stablehlo.all_reduce"(%29) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 4], [1, 5], [2, 6], [3, 7]]> : tensor<4x2xi64>, use_global_device_ids}> ({
      ^bb0(%arg6: tensor<f32>, %arg7: tensor<f32>):
        %32 = stablehlo.add %arg6, %arg7 : tensor<f32>
        stablehlo.return %32 : tensor<f32>
      }) : (tensor<f32>) -> tensor<f32>
      %cst_7 = stablehlo.constant dense<2.000000e+00> : tensor<f32>
      %31 = stablehlo.divide %30, %cst_7 : tensor<f32>
      sdy.return %31 : tensor<f32>
    } : (tensor<8x12xf32>, tensor<12x32xf32>, tensor<8xi32>) -> tensor<f32>
    return %0 : tensor<f32>
  }
  func.func private @_where(%arg0: tensor<4x8xi1>, %arg1: tensor<4x8xf32>, %arg2: tensor<f32>) -> tensor<4x8xf32> {
    %0 = stablehlo.convert %arg2 : tensor<f32>
    %1 = stablehlo.broadcast_in_dim %0, dims = [] : (tensor<f32>) -> tensor<4x8xf32>
    %2 = stablehlo.select %arg0, %arg1, %1 : tensor<4x8xi1>, tensor<4x8xf32>
    return %2 : tensor<4x8xf32>
  }
}
