// Bench around the chip: external memory with latency, jitter, refused requests and
// stalled answers, checks of the bus protocol, and counters. cocotb drives the rest.
`timescale 1ns / 1ps

module bench #(
    parameter BEATS = 32768,  // memory size in beats of 16 bytes
    parameter STEPS = 128     // steps of the sequencer's program, for the profile
) (
    input  wire        clk /*verilator public_flat_rw*/,
    input  wire        rst_n /*verilator public_flat_rw*/,
    input  wire        load /*verilator public_flat_rw*/,          // read the image file
    input  wire        dump /*verilator public_flat_rw*/,          // write memory and profile out
    input  wire        run /*verilator public_flat_rw*/,           // hold until the command is taken
    input  wire [31:0] latency /*verilator public_flat_rw*/,       // least cycles from request to answer
    input  wire [31:0] jitter /*verilator public_flat_rw*/,        // up to so many more
    input  wire [31:0] refuse /*verilator public_flat_rw*/,        // per mille of cycles without mem_req_ready
    input  wire [31:0] stall /*verilator public_flat_rw*/,         // per mille of cycles without an answer
    input  wire [27:0] out_first /*verilator public_flat_rw*/,     // writes must lie in these beats
    input  wire [27:0] out_last /*verilator public_flat_rw*/,
    output reg         done /*verilator public_flat_rw*/,
    output reg  [31:0] cycles /*verilator public_flat_rw*/,        // from the command's acceptance to DONE
    output reg  [31:0] read_beats /*verilator public_flat_rw*/,
    output reg  [31:0] write_beats /*verilator public_flat_rw*/,
    output reg  [31:0] last_write /*verilator public_flat_rw*/,    // beat address of the latest write
    output reg  [31:0] answer /*verilator public_flat_rw*/,
    output reg  [31:0] violation /*verilator public_flat_rw*/      // 0, or the number of the broken rule
);
    wire         cmd_ready, rsp_valid;
    wire [31:0]  rsp_data;
    wire         req_valid, req_write, mem_rsp_ready;
    wire [35:0]  req_addr;
    wire [127:0] req_wdata;
    wire [15:0]  req_wstrb;
    reg          req_ready, mem_rsp_valid;
    reg  [127:0] mem_rsp_rdata;

    delta45_top dut (
        .clk(clk), .rst_n(rst_n),
        .cmd_valid(run), .cmd_ready(cmd_ready), .cmd_data(32'h1),
        .rsp_valid(rsp_valid), .rsp_ready(1'b1), .rsp_data(rsp_data),
        .mem_req_valid(req_valid), .mem_req_ready(req_ready), .mem_req_write(req_write),
        .mem_req_addr(req_addr), .mem_req_wdata(req_wdata), .mem_req_wstrb(req_wstrb),
        .mem_rsp_valid(mem_rsp_valid), .mem_rsp_ready(mem_rsp_ready),
        .mem_rsp_rdata(mem_rsp_rdata)
    );

    reg [127:0] mem [0:BEATS-1];
    reg [31:0]  profile [0:STEPS-1];
    string image_file, dump_file, profile_file;

    localparam QUEUE = 4096;
    reg [127:0] queue_data [0:QUEUE-1];
    reg [31:0]  queue_due [0:QUEUE-1];
    reg [11:0]  head, tail;
    reg [31:0]  now, due;
    reg         busy, waiting;
    reg [35:0]  held_addr;
    reg [127:0] held_data;
    reg         held_write;
    reg [15:0]  held_strobe;
    integer     i;

    wire accept = req_valid & req_ready;
    wire taken = mem_rsp_valid & mem_rsp_ready;
    wire [11:0] head_next = taken ? head + 12'd1 : head;

    task automatic broken(input [31:0] rule);
        if (violation == 0) violation <= rule;
    endtask

    always @(posedge clk) begin
        now <= now + 1;
        if (load) begin
            if ($value$plusargs("image=%s", image_file)) $readmemh(image_file, mem);
        end
        if (dump) begin
            if ($value$plusargs("dump=%s", dump_file)) $writememh(dump_file, mem);
            if ($value$plusargs("profile=%s", profile_file)) $writememh(profile_file, profile);
        end
        if (!rst_n) begin
            head <= 0; tail <= 0; now <= 0; due <= 0; busy <= 0; waiting <= 0;
            done <= 0; cycles <= 0; read_beats <= 0; write_beats <= 0; violation <= 0;
            last_write <= 0; answer <= 0;
            req_ready <= 0; mem_rsp_valid <= 0;
            for (i = 0; i < STEPS; i = i + 1) profile[i] <= 0;
        end else begin
            // Command and answer.
            if (run & cmd_ready) begin
                busy <= 1; cycles <= 0; done <= 0;
            end else if (busy) begin
                cycles <= cycles + 1;
                profile[dut.sequencer.step] <= profile[dut.sequencer.step] + 1;
            end
            if (rsp_valid) begin
                busy <= 0; done <= 1; answer <= rsp_data;
                if (!busy) broken(1);
            end
            // Requests.
            req_ready <= ($urandom % 1000) >= refuse;
            waiting <= req_valid & ~req_ready;
            held_addr <= req_addr; held_data <= req_wdata;
            held_write <= req_write; held_strobe <= req_wstrb;
            if (waiting) begin
                if (!req_valid) broken(2);
                else if (req_addr != held_addr || req_write != held_write) broken(3);
                else if (req_write && (req_wdata != held_data || req_wstrb != held_strobe))
                    broken(3);
            end
            if (req_valid && req_addr[3:0] != 0) broken(4);
            if (accept) begin
                if (req_addr[35:4] >= BEATS) broken(5);
                else if (req_write) begin
                    write_beats <= write_beats + 1;
                    last_write <= {4'b0, req_addr[31:4]};
                    if (req_addr[31:4] < out_first || req_addr[31:4] > out_last) broken(6);
                    for (i = 0; i < 16; i = i + 1)
                        if (req_wstrb[i]) mem[req_addr[35:4]][8*i +: 8] <= req_wdata[8*i +: 8];
                end else begin
                    read_beats <= read_beats + 1;
                    queue_data[tail] <= mem[req_addr[35:4]];
                    due = now + latency + (jitter == 0 ? 0 : $urandom % (jitter + 1));
                    queue_due[tail] <= due;
                    tail <= tail + 1;
                    if (tail + 12'd1 == head) broken(7);
                end
            end
            // Answers, in order.
            head <= head_next;
            if (!mem_rsp_valid || taken) begin
                mem_rsp_valid <= head_next != tail && queue_due[head_next] <= now + 1
                                 && ($urandom % 1000) >= stall;
                mem_rsp_rdata <= queue_data[head_next];
            end
        end
    end
endmodule
