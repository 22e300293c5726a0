// SPDX-License-Identifier: Apache-2.0

package userspace

import "golang.org/x/net/ipv4"

// batchSize is the maximum number of datagrams in a batch.
const batchSize = 32

// maxDatagram is larger than any UDP datagram.
const maxDatagram = 1 << 16

// batch has buffers for datagrams. Unused parts of the buffers take no memory.
type batch struct {
	messages [batchSize]ipv4.Message
	whole    [batchSize][]byte
}

func newBatch() *batch {
	b := &batch{}
	memory := make([]byte, batchSize*maxDatagram)
	for i := range b.messages {
		b.whole[i] = memory[i*maxDatagram : (i+1)*maxDatagram]
		b.messages[i].Buffers = make([][]byte, 1)
	}
	b.reset()
	return b
}

// reset gives each message its whole buffer.
func (b *batch) reset() {
	for i := range b.messages {
		b.messages[i].Buffers[0] = b.whole[i]
		b.messages[i].Addr = nil
	}
}

// maxBatches limits the number of batches, which have 2 MiB each. No goroutine blocks
// while it uses a batch, so more batches than cores are useless.
const maxBatches = 16

// batches is a pool of batches. It is safe for concurrent use. A sync.Pool would free the
// batches at each garbage collection, and allocating them again is expensive.
type batches struct {
	free chan *batch
	// unmade has a token for each batch that may still be allocated.
	unmade chan struct{}
}

func newBatches() *batches {
	return &batches{make(chan *batch, maxBatches), make(chan struct{}, maxBatches)}
}

// get returns a batch. It waits while all batches are in use.
func (b *batches) get() *batch {
	select {
	case batch := <-b.free:
		return batch
	default:
	}
	select {
	case batch := <-b.free:
		return batch
	case b.unmade <- struct{}{}:
		return newBatch()
	}
}

func (b *batches) put(batch *batch) {
	batch.reset()
	b.free <- batch
}
