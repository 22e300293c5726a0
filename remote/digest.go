// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"bytes"
	"cmp"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"hash"
	"slices"

	"github.com/kpng-project/kpng/internal/wire/localv1"
	"k8s.io/apimachinery/pkg/types"
)

// When a client reconnects, the server may not know the client's token. So the client
// also sends digests of its services. Any server can compare these digests. The name of a
// service determines its bucket. The server sends only the buckets whose digests differ.
//
// Tenants choose the content of services. So the digest of a service is a whole SHA-256.
// The digest of a bucket may be short, because it includes a random salt of the client.

// digested is a service with the digest of its content.
type digested struct {
	key     types.NamespacedName
	order   uint32 // a hash of the name; a bucket is a range of these hashes
	content [sha256.Size]byte
}

// newDigested returns a service with the digest of its content. The content is an encoded
// WholeService or ServiceFrontends.
func newDigested(key types.NamespacedName, content []byte) digested {
	return digested{key, orderOf(key), sha256.Sum256(content)}
}

func orderOf(key types.NamespacedName) uint32 {
	sum := sha256.Sum256([]byte(servicePath(key)))
	return binary.BigEndian.Uint32(sum[:])
}

// bucketOf returns the bucket of a service, if there are n buckets.
func bucketOf(order uint32, n int) int { return int(uint64(order) * uint64(n) >> 32) }

// sortDigested sorts services by bucket, for any number of buckets.
func sortDigested(list []digested) {
	slices.SortFunc(list, func(a, b digested) int {
		return cmp.Or(cmp.Compare(a.order, b.order), bytes.Compare(a.content[:], b.content[:]))
	})
}

const (
	bucketDigest = 8 // bytes
	maxBuckets   = 1024
	saltSize     = 16
)

// bucketHash computes the digests of buckets.
type bucketHash struct {
	hash hash.Hash
	salt []byte
	sum  [sha256.Size]byte
}

func newBucketHash(salt []byte) *bucketHash { return &bucketHash{hash: sha256.New(), salt: salt} }

// of returns the digest of a bucket with the given sorted services. The result is valid
// until the next call.
func (h *bucketHash) of(services []digested) []byte {
	h.hash.Reset()
	h.hash.Write(h.salt)
	for i := range services {
		h.hash.Write(services[i].content[:])
	}
	return h.hash.Sum(h.sum[:0])[:bucketDigest]
}

// bucketsOf divides sorted services into n buckets, and yields the services of each
// bucket.
func bucketsOf(services []digested, n int) func(yield func(bucket int, services []digested) bool) {
	return func(yield func(int, []digested) bool) {
		for bucket := range n {
			end := 0
			for end < len(services) && bucketOf(services[end].order, n) == bucket {
				end++
			}
			if !yield(bucket, services[:end:end]) {
				return
			}
			services = services[end:]
		}
	}
}

// digests returns the digests of the client's services. It returns nil if the client
// has nothing yet.
func (s *clientState) digests() *localv1.Digests {
	if s.revision == 0 {
		return nil
	}
	salt := make([]byte, saltSize)
	rand.Read(salt) // cannot fail
	return digestsOf(salt, s.digested())
}

// digested returns the client's services, sorted.
func (s *clientState) digested() []digested {
	list := make([]digested, 0, s.views.Len())
	for key, e := range s.views.All() {
		list = append(list, newDigested(key, e.content()))
	}
	sortDigested(list)
	return list
}

// digestsOf returns the digests of sorted services.
func digestsOf(salt []byte, list []digested) *localv1.Digests {
	n := 16
	for n < len(list) && n < maxBuckets {
		n *= 2
	}
	d, h := &localv1.Digests{Salt: salt}, newBucketHash(salt)
	for _, services := range bucketsOf(list, n) {
		d.Buckets = append(d.Buckets, h.of(services)...)
	}
	return d
}

// bucketCount returns the number of buckets. It returns 0 if the digests are missing or
// invalid.
func bucketCount(d *localv1.Digests) int {
	n := len(d.GetBuckets()) / bucketDigest
	if n*bucketDigest != len(d.GetBuckets()) || n > maxBuckets || n&(n-1) != 0 || len(d.GetSalt()) != saltSize {
		return 0
	}
	return n
}
